"""Cards for the Hugging Face Hub: what a dataset or a model is, and where it comes from.

- `write_dataset_card`: the card (`README.md`) and its pictures, beside the data they describe
- `write_model_card`: the card of a model and its `Result`s, beside the weights
- `hub_cards.measures`: the numbers on a dataset's card, from the rows alone
- `hub_cards.pictures`: the pictures of a card
- `hub_cards.publish`: a folder as the next version on the Hub, one commit and one tag
- `hub_cards.versions`, `comparison`, `verify`: what is there, what differs, what does not agree
- `hub_cards.parts`: the parts of a card's text, ours and those of people
"""

from hub_cards.cards import write_dataset_card
from hub_cards.models import Result, write_model_card

__all__ = ["Result", "write_dataset_card", "write_model_card"]
