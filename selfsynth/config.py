"""`--config FILE.yaml`: the flags of a command in a file; a flag on the command line wins."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from selfsynth.errors import UsageError


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key that stands twice, where YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise UsageError(
                    f"the key {key!r} stands twice (line {key_node.start_mark.line + 1})"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict:
    """Load a YAML file that holds one mapping.

    Raises:
        UsageError: no such file, no mapping, no YAML, or a key that stands twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.load(text, _UniqueKeys)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except TypeError:
        raise UsageError(f"{path}: a key must be a plain word") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} must hold `flag: value` lines")
    return found


def _take(context: typer.Context, path: Path | None) -> Path | None:
    if path is None:
        return None
    known = {one.name: one for one in context.command.params if one.name not in ("config", "help")}
    values = load_yaml(path)
    if unknown := sorted(str(key) for key in values if key not in known):
        raise UsageError(f"{path}: unknown keys: {', '.join(unknown)}")
    context.default_map = {
        key: _fitting(value, known[key], f"{path}: {key}") for key, value in values.items()
    }
    return path


def _fitting(value: object, flag: Any, where: str) -> object:
    """Return a value as the flag's own check takes it, or say why it never can."""
    if flag.is_flag != isinstance(value, bool):
        raise UsageError(f"{where} must be {'true or false' if flag.is_flag else 'a value'}")
    values = value if isinstance(value, list) and flag.multiple else [value]
    if any(isinstance(one, dict | list | None) for one in values):
        raise UsageError(
            f"{where} must be {'one value or a list' if flag.multiple else 'one value'}"
        )
    return [str(one) for one in values] if flag.multiple else value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_take,
        is_eager=True,
        help="A YAML file with flags, dashes as underscores; unknown or doubled keys are errors.",
    ),
]
