"""A served model as lm-eval sees one: what it generates comes from `selfsynth.serving`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import LM

from selfsynth.errors import SelfsynthError
from selfsynth.serving import Completion, Request

MOST_STOPS = 4  # that OpenAI's protocol takes


class ServedLM(LM):
    """Answers lm-eval's generation requests by chat completions, all of a task at once.

    Args:
        ask: answers requests, in their order.
        max_tokens: of an answer, where the task does not say.

    Attributes:
        answers: by request in the order asked, with what lm-eval does not keep of them.
    """

    tokenizer_name = "served"

    def __init__(self, ask: Callable[[Sequence[Request]], Sequence[Completion]], max_tokens: int):
        super().__init__()
        self._ask, self._max_tokens = ask, max_tokens
        self.answers: list[Completion] = []

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Hand the conversation through: the server has the template."""
        return json.dumps(
            [{"role": one["role"], "content": one["content"]} for one in chat_history]
        )

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the texts, cut at the first stop sequence; "" where there is none."""
        asked, stops = [], []
        for instance in requests:
            messages, settings = instance.args
            until = settings.get("until") or []
            stops.append([until] if isinstance(until, str) else list(until))
            asked.append(
                Request(
                    json.loads(messages),
                    settings.get("max_gen_toks") or self._max_tokens,
                    temperature=0.0,
                    top_p=1.0,
                    seed=0,
                    stop=stops[-1][:MOST_STOPS] or None,
                )
            )
        self.answers = list(self._ask(asked))
        return [
            _cut(answer.text or "", some) for answer, some in zip(self.answers, stops, strict=True)
        ]

    def loglikelihood(self, requests: Sequence[Any]) -> list:
        """Refuse: a chat server gives no log-probabilities of a prompt."""
        raise SelfsynthError("no prompt log-probabilities")

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list:
        """Refuse, for the same reason."""
        raise SelfsynthError("no prompt log-probabilities")


def _cut(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first stop sequence: some servers ignore them."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
