"""selfsynth: align a language model on preference data that it made itself.

The library under the rooms `pipelines`, `recipes`, `eval` and `hub_cards`:

- `selfsynth.serving`: one door to a model, for every room
- `selfsynth.judge`: judge prompts, and how their answers are read
- `selfsynth.schema`: the columns and drop reasons of a dataset
- `selfsynth.runs`, `provenance`, `revisions`: run folders, where they come from, exact versions
- `selfsynth.stats`, `progress`, `errors`: intervals, progress lines, one-line errors
"""

__version__ = "0.1.0"
