"""The flags that more than one command has, each declared once: the same name, the same meaning."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Option(
        help="embedded or embedded-1.5b; a GGUF (path or REPO:FILE.gguf, or "
        "BASE.gguf+LORA.gguf); a Hub id or folder; with --base-url a server's name for it"
    ),
]
BaseUrl = Annotated[
    list[str] | None, typer.Option(help="URL of a running server (…/v1); repeatable")
]
ApiKeyEnv = Annotated[
    str | None, typer.Option(help="environment variable that holds the servers' key")
]
Judge = Annotated[
    str | None, typer.Option(help="another model as the judge; default: the model itself")
]
JudgeBaseUrl = Annotated[
    list[str] | None, typer.Option(help="URL of the judge's server; repeatable")
]
JudgeApiKeyEnv = Annotated[
    str | None, typer.Option(help="environment variable that holds the judge's key")
]
Personas = Annotated[
    str | None,
    typer.Option(
        help="FILE.jsonl, FILE.txt or HUB_DATASET[@REV] (column persona); default: our own sampler"
    ),
]
NoPersonas = Annotated[
    bool,
    typer.Option("--no-personas", help="the paper's ablation: prompts of nobody in particular"),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        help="take the prompts from FILE.jsonl, FILE.txt or HUB_DATASET[@REV] (column prompt)"
    ),
]
Language = Annotated[
    str | None, typer.Option(help="language of prompts and personas: de, German, …")
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, max=2.0, help="of prompts and responses; default 0.6")
]
TopP = Annotated[float | None, typer.Option(help="above 0, at most 1; default 1.0")]
GenerationDefaults = Annotated[
    str,
    typer.Option(
        help="paper: temperature 0.6, top-p 1; model: the model's own generation settings"
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="tokens an answer may have")]
SystemPrompt = Annotated[str | None, typer.Option(help="system prompt of the responses")]
Thinking = Annotated[
    bool, typer.Option("--thinking", help="a thinking model may think before it writes")
]
JudgeThinking = Annotated[
    bool, typer.Option("--judge-thinking", help="a thinking judge may think before its verdict")
]
JudgeOrders = Annotated[
    int, typer.Option(min=1, max=2, help="pairwise: 2 shows a pair both ways, 1 is the paper's")
]
JudgeCriteria = Annotated[
    Path | None, typer.Option(help="a text file with the criteria; default: the paper's four")
]
AuditModes = Annotated[
    str | None, typer.Option(help="modes to try, such as rating,yesno; default: all three")
]
AuditPrompts = Annotated[
    int | None, typer.Option(min=1, help="prompts to try the judge on; default: by the run's size")
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="requests in flight; default 16, 8 for a GGUF")
]
Timeout = Annotated[float, typer.Option(min=0.1, help="seconds that one try of a request may take")]
Batch = Annotated[
    bool,
    typer.Option(
        "--batch", help="ask servers by OpenAI's batch protocol: hours, at half the price"
    ),
]
MaxRequests = Annotated[
    int | None, typer.Option(min=1, help="stop after so many requests; the same command goes on")
]
MaxTokensTotal = Annotated[
    int | None, typer.Option(min=1, help="stop after so many tokens, read and written")
]
Seed = Annotated[int, typer.Option(min=0)]
Reuse = Annotated[
    list[Path] | None,
    typer.Option(help="folder of another run whose answers are not asked for again; repeatable"),
]
