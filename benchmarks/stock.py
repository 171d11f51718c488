"""The flow of SAO in distilabel's own classes, as their documentation has one write it.

Five TextGeneration tasks with an OpenAILLM each (prompt, two responses, both orders of the judge)
in one Pipeline, all settings at their defaults: batches of 50 rows, all requests of a batch at
once, a process a step. No store, no ledger, no filters. `own_cost.py` runs it.

    python benchmarks/stock.py URL PERSONAS.json
"""

import json
import logging
import sys
from pathlib import Path

from distilabel.models import OpenAILLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import TextGeneration

from pipelines.sao import prompt_for_prompt
from selfsynth import judge as judging

COLUMNS = {"one": "{{ one }}", "other": "{{ other }}", "prompt": "{{ prompt }}"}
QUESTION = judging.judge_prompt("pairwise", COLUMNS["prompt"], [COLUMNS["one"], COLUMNS["other"]])
SWAPPED = judging.judge_prompt("pairwise", COLUMNS["prompt"], [COLUMNS["other"], COLUMNS["one"]])
SAMPLED = {"temperature": 0.6, "top_p": 1.0, "max_new_tokens": 1024}
JUDGED = {"temperature": 0.0, "max_new_tokens": 1, "logprobs": True, "top_logprobs": 20}


def task(
    url: str, name: str, template: str, columns: list[str], seed: int, **sampling: object
) -> TextGeneration:
    """Return a task that puts the model's answer to a template into a column of its name."""
    llm = OpenAILLM(
        model="instant",
        base_url=url,
        api_key="none",
        generation_kwargs={**sampling, "extra_body": {"seed": seed}},
    )
    return TextGeneration(
        name=f"write-{name}",
        llm=llm,
        template=template,
        columns=columns,
        output_mappings={"generation": name, "model_name": f"{name}_model"},
    )


def declare(url: str, personas: list[str]) -> Pipeline:
    """Return the pipeline."""
    with Pipeline("stock") as pipeline:
        (
            LoadDataFromDicts(data=[{"persona": persona} for persona in personas])
            >> task(url, "prompt", prompt_for_prompt("{{ persona }}", None),
                    ["persona"], 0, **SAMPLED)
            >> task(url, "one", COLUMNS["prompt"], ["prompt"], 1, **SAMPLED)
            >> task(url, "other", COLUMNS["prompt"], ["prompt"], 2, **SAMPLED)
            >> task(url, "forward", QUESTION, ["prompt", "one", "other"], 0, **JUDGED)
            >> task(url, "backward", SWAPPED, ["prompt", "one", "other"], 0, **JUDGED)
        )  # fmt: skip
    return pipeline


def main() -> None:
    """Run the pipeline and say when its rows are there."""
    # A line a request on the terminal would be charged to distilabel.
    for name in ("httpx", "httpx2", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    personas = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    rows = declare(sys.argv[1], personas).run(use_cache=False)["default"]["train"]
    answers = ("prompt", "one", "other", "forward", "backward")
    missing = sum(value is None for name in answers for value in rows[name])
    print(f"{len(rows)} rows are there, {missing} answers missing", file=sys.stderr)
    if missing or len(rows) != len(personas):
        raise SystemExit("the stock pipeline lost answers")


if __name__ == "__main__":
    main()
