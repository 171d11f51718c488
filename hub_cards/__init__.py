"""Cards for the Hugging Face Hub: what a dataset is, in numbers recomputed from its own rows.

- `write_dataset_card`: the card (`README.md`) and its pictures, beside the data they describe
- `hub_cards.measures`: the numbers on a card, from the rows alone
- `hub_cards.pictures`: the pictures of a card
"""

from hub_cards.cards import write_dataset_card

__all__ = ["write_dataset_card"]
