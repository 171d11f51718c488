"""Engines: model servers that run as children of the command and end with it."""

import http.client
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from selfsynth.errors import SelfsynthError
from selfsynth.processes import end

_START_LIMIT = 1800.0  # seconds: a large model may first be downloaded


@dataclass(eq=False)
class Engine:
    """A running model server of ours; `context` is the tokens a request may have in all."""

    url: str
    name: str
    version: str
    process: subprocess.Popen
    log: Path
    context: int | None = None
    api_key: str | None = None

    @property
    def running(self) -> bool:
        """Whether the engine's process is alive."""
        return self.process.poll() is None


@contextmanager
def llama(
    gguf: Path,
    lora: Path | None,
    name: str,
    slots: int,
    context: int,
    log: Path,
    own_sampling: bool = False,
) -> Iterator[Engine]:
    """Serve a GGUF, with a LoRA adapter on it if there is one, by llama.cpp.

    Args:
        name: the model's name in requests.
        slots: requests that are answered side by side.
        context: tokens a slot holds, prompt and answer together.
        log: the file that the engine's own output is appended to.
        own_sampling: sample as the GGUF says, or else as llama.cpp does by itself, where a request
            does not say how.

    Raises:
        SelfsynthError: xllamacpp is not installed, or the engine does not start.
    """
    try:
        import xllamacpp  # noqa: F401
    except ImportError:
        raise SelfsynthError(
            "serving a GGUF needs xllamacpp: pip install 'selfsynth[embedded]'"
        ) from None
    command = [sys.executable, "-m", "selfsynth.serving.llama_engine", str(gguf)]
    command += ["--name", name, "--slots", str(slots), "--context", str(context)]
    command += ["--lora", str(lora)] if lora else []
    command += ["--own-sampling"] if own_sampling else []
    since = _size(log)
    with _child(command, log, stdout=subprocess.PIPE) as process:
        line = process.stdout.readline()  # empty when the process ends without it
        if not line:
            raise SelfsynthError(f"llama.cpp cannot serve {gguf.name}: {_last_line(log, since)}")
        ready = json.loads(line)
        yield Engine(ready["url"], "llama.cpp (xllamacpp)", ready["version"], process, log, context)


@contextmanager
def vllm(
    model: str,
    revision: str | None,
    context: int,
    share: float,
    log: Path,
    own_sampling: bool = False,
) -> Iterator[Engine]:
    """Serve a model of the Hub or a folder by a `vllm serve` child.

    Args:
        model: a Hub id or a folder.
        revision: the commit of a Hub id.
        context: tokens a request needs at most: a model's own maximum may not fit on the GPU.
        share: the part of what vLLM takes by itself (0.9 of a GPU's memory) that it may take.
        own_sampling: sample as the model's generation_config.json says where a request does not.

    Raises:
        SelfsynthError: no vllm or no GPU is here, or vllm does not start.
    """
    if not shutil.which("vllm"):
        raise SelfsynthError(
            f"serving {model} needs vllm and a GPU, and no vllm is here: "
            "give a GGUF file, or a server's --base-url"
        )
    if not gpu_found():
        raise SelfsynthError(
            f"serving {model} by vllm needs a GPU, and none was found: "
            "give a GGUF file, or a server's --base-url"
        )
    port, key = _free_port(), secrets.token_hex(16)
    command = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    # Unless asked for, not what the model's generation_config.json would add unseen.
    command += ["--generation-config", "auto" if own_sampling else "vllm", "--max-logprobs", "20"]
    command += ["--revision", revision, "--tokenizer-revision", revision] if revision else []
    if longest := longest_context(model, revision):
        context = min(context, longest)
        command += ["--max-model-len", str(context)]
    if share < 1:
        command += ["--gpu-memory-utilization", f"{0.9 * share:.2f}"]
    root, since = f"http://127.0.0.1:{port}", _size(log)
    with _child(command, log, env={**os.environ, "VLLM_API_KEY": key}) as process:
        deadline = time.monotonic() + _START_LIMIT
        while _get(f"{root}/health") is None:
            if process.poll() is not None:
                raise SelfsynthError(f"vllm cannot serve {model}: {_last_line(log, since)}")
            if time.monotonic() > deadline:
                raise SelfsynthError(f"vllm did not answer within {_START_LIMIT:.0f} s: see {log}")
            time.sleep(0.5)
        version = json.loads(_get(f"{root}/version") or "{}").get("version", "unknown")
        yield Engine(f"{root}/v1", "vllm", version, process, log, longest and context, key)


def longest_context(model: str, revision: str | None) -> int | None:
    """Return the tokens that a model of the Hub or a folder can hold, None where it is not said."""
    try:
        path = Path(model, "config.json")
        if not path.is_file():
            path = _config_of(model, revision)
        config = json.loads(path.read_text(encoding="utf-8"))
        longest = config.get("text_config", config).get("max_position_embeddings")
    except Exception:  # no Hub, no such file, not what we know: vLLM will say what it needs
        return None
    return longest if isinstance(longest, int) else None


def _config_of(model: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        # One short question first: where no Hub can be reached, a download would try for long.
        HfApi().model_info(model, revision=revision, timeout=5)
        return Path(hf_hub_download(model, "config.json", revision=revision))


def gpu_found() -> bool:
    """Whether the vendor's own tool lists a GPU (NVIDIA or AMD)."""
    for command in (["nvidia-smi", "-L"], ["rocm-smi", "-i"]):
        if shutil.which(command[0]) and not subprocess.run(command, capture_output=True).returncode:
            return True
    return False


@contextmanager
def _child(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    # The guard ends with us: an engine that is loading a model may be deaf to everything.
    guard = [sys.executable, "-m", "selfsynth.guard", str(os.getpid())]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stderr=output,
            # A Ctrl-C at the terminal is for the command, which ends its engines itself.
            start_new_session=True,
            **({"stdout": output} | options),
        )
    try:
        yield process
    finally:
        end(process)
        if process.stdout:
            process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _get(url: str) -> str | None:
    # The user's proxy is for the world outside, not for a server of our own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return answer.read().decode()
    except (OSError, http.client.HTTPException):  # HTTP's error statuses are OSErrors here
        return None


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _last_line(log: Path, since: int) -> str:
    """Return the line that tells most of what an engine wrote to its log after `since` bytes."""
    lines = log.read_bytes()[since:].decode(errors="replace").split("\n")[-50:]
    if causes := [line for line in lines if re.match(r"[\d.]+ E ", line)]:
        # llama.cpp's errors, from the cause to what failed because of it.
        return f"{causes[0].partition(' E ')[2].strip()[:300]} (see {log})"
    told = [line for line in lines if "error" in line.lower()] or [line for line in lines if line]
    return f"{told[-1].strip()[:300] if told else 'no output'} (see {log})"
