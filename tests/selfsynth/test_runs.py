"""A run folder: one command at a time, one identity, and a dataset that is whole or not there."""

import errno
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.runs import RunFolder, write_data
from selfsynth.schema import LEDGER_SCHEMA, PAIR_SCHEMA, pair_id, split_of

fixed = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
HOLDER = """
    import os, sys, time
    from selfsynth.runs import RunFolder
    run = RunFolder(sys.argv[1]).__enter__()
"""


def start(code, folder):
    """Start Python on some code with the folder as its argument; returns once it says a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    process.said = process.stdout.readline().strip()
    return process


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder `tmp_path/run`."""
    process = start(HOLDER + "    print('held', flush=True); time.sleep(60)", tmp_path / "run")
    assert process.said == "held"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


# ---------------------------------------------------------------- the lock


def test_a_second_command_is_refused(holder, tmp_path):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(SelfsynthError, match=r"another command is at work in .*run") as caught, run:
        pass
    assert caught.value.exit_status == 1
    assert "\n" not in str(caught.value)
    holder.kill()  # SIGKILL: no chance to tidy up
    holder.wait()
    with run:
        pass


def test_a_refused_command_leaves_the_folder_as_it_was(holder, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SelfsynthError), RunFolder(tmp_path / "run"):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_children_do_not_inherit_the_lock(tmp_path):
    """A forked worker that lives on must not keep the folder from the next command."""
    code = (
        HOLDER
        + """
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    os._exit(0)
    """
    )
    parent = start(code, tmp_path / "run")
    child = int(parent.said)
    try:
        assert parent.wait(10) == 0
        os.kill(child, 0)  # it lives
        with RunFolder(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_the_lock_is_held_until_the_end_and_no_longer(tmp_path):
    folder = tmp_path / "run"
    code = HOLDER + "    print('held', flush=True)"
    with RunFolder(folder):
        refused = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(folder)],
            capture_output=True,
            text=True,
        )
        assert refused.returncode == 1
        assert "another command is at work" in refused.stderr
    free = start(code, folder)
    assert (free.said, free.wait(10)) == ("held", 0)
    free.stdout.close()


# ---------------------------------------------------------------- which folders


@pytest.mark.parametrize(
    "inside", [["notes.txt"], ["data", "README.md"], [".git"], ["requests.py"]]
)
def test_a_folder_of_other_things_is_refused(tmp_path, inside):
    for name in inside:
        (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match="holds other things") as caught, RunFolder(tmp_path):
        pass
    assert caught.value.exit_status == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(inside)


def test_somebody_elses_requests_folder_is_no_run(tmp_path):
    """`requests` is a common name; a finished run would replace the README beside it."""
    (tmp_path / "requests").mkdir()
    (tmp_path / "README.md").write_text("my project")
    with pytest.raises(UsageError, match="holds other things"), RunFolder(tmp_path):
        pass
    assert not (tmp_path / "requests" / "lock").exists()


def test_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(UsageError, match="is not a folder"), RunFolder(tmp_path / "run"):
        pass


@pytest.mark.parametrize("prepare", ["missing", "empty", "killed early", "deep"])
def test_folders_that_are_taken(tmp_path, prepare):
    folder = tmp_path / ("a/b/c" if prepare == "deep" else "run")
    if prepare == "empty":
        folder.mkdir()
    if prepare == "killed early":  # between the folder and its lock
        (folder / "requests").mkdir(parents=True)
    with RunFolder(folder) as run:
        assert run.seconds == pytest.approx(0, abs=1)
        assert run.complete() is None
    with RunFolder(str(folder)):  # again, and as text
        pass


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(SelfsynthError, match="cannot be written: Not a directory") as caught,
        RunFolder(tmp_path / "file" / "run"),
    ):
        pass
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("path", ["/proc/self/nothing/run", "/sys/nothing/run"])
def test_a_place_that_takes_no_folders(path):
    with pytest.raises(SelfsynthError, match=f"{path} cannot be written: ."), RunFolder(path):
        pass


def test_a_read_only_folder(tmp_path, monkeypatch):
    """Also for a superuser, who may write everywhere but on a read-only disk."""

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    with (
        pytest.raises(SelfsynthError, match="cannot be written: Read-only file system"),
        RunFolder(tmp_path / "run"),
    ):
        pass


# ---------------------------------------------------------------- identity

IDENTITY = {
    "method": "sao",
    "model": "me/model@0123",
    "personas": {"source": "file", "name": "people.txt", "sha256": "ab" * 32},
    "temperature": 0.6,
    "min_margin": 1e-06,
    "keep_truncated": False,
    "revision": None,
    "seed": 0,
}


@pytest.fixture
def run(tmp_path):
    with RunFolder(tmp_path / "run") as run:
        yield run


def test_the_same_identity_is_welcome(run):
    run.check_identity(IDENTITY)  # nothing written yet
    run.write_config(IDENTITY, ["sao.py", "--seed", "0"])
    run.check_identity(IDENTITY)
    run.check_identity(dict(reversed(IDENTITY.items())))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"temperature": 0.7}, "temperature: 0.6 there, 0.7 here"),
        ({"model": "other"}, "model: 'me/model@0123' there, 'other' here"),
        ({"keep_truncated": True}, "keep_truncated: False there, True here"),
        ({"labels": "self"}, "labels: 'none' there, 'self' here"),
        ({"personas": {"source": "builtin"}}, "personas.source: 'file' there, 'builtin' here"),
        ({"seed": 1, "method": "x"}, "method: 'sao' there, 'x' here; seed: 0 there, 1 here"),
    ],
)
def test_another_identity_is_refused_and_named(run, change, named):
    run.write_config(IDENTITY, [])
    with pytest.raises(UsageError, match=named) as caught:
        run.check_identity(IDENTITY | change)
    assert caught.value.exit_status == 2
    assert "--output-dir" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_that_is_gone_is_named(run):
    run.write_config(IDENTITY, [])
    fewer = {key: value for key, value in IDENTITY.items() if key != "seed"}
    with pytest.raises(UsageError, match="seed: 0 there, 'none' here"):
        run.check_identity(fewer)


@pytest.mark.parametrize(
    "text", [b"", b"identity: 5\n", b"[1", b"a: 1\n", b"identity:\n", b"\xff\xfe", b"- 1\n"]
)
def test_a_config_that_cannot_be_read(run, text):
    (run.path / "config.yaml").write_bytes(text)
    with pytest.raises(SelfsynthError, match=r"config\.yaml cannot be read \(\w+\)") as caught:
        run.check_identity(IDENTITY)
    assert caught.value.exit_status == 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@settings(fixed, max_examples=150)
@given(
    identity=st.dictionaries(st.text(max_size=8), values, max_size=4),
    command=st.lists(st.text(max_size=8), max_size=3),
)
def test_what_was_written_is_the_same_again(run, identity, command):
    """No value changes on its way through YAML: 1e-06, "no", "2024-01-01", emoji, "\\x85"."""
    run.write_config(identity, command)
    run.check_identity(identity)


def test_the_config_is_utf_8_in_any_locale(run):
    (run.path / "config.yaml").write_text("identity:\n  model: žlu 😀\n", encoding="utf-8")
    code = """
        import sys
        from selfsynth.runs import RunFolder
        RunFolder(sys.argv[1]).check_identity({"model": "\\u017elu \\U0001f600"})
        print("same")
    """
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(run.path)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout == "same\n", done.stderr


# ---------------------------------------------------------------- time


def test_seconds_add_up_over_commands(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("selfsynth.runs.time", SimpleNamespace(monotonic=lambda: clock[0]))
    noted = tmp_path / "run/requests/seconds"
    with RunFolder(tmp_path / "run") as run:
        clock[0] += 0.4
        run.note_seconds()
        assert run.seconds == pytest.approx(0.4) and not noted.exists()  # once a second is enough
        clock[0] += 10
        run.note_seconds()
        clock[0] += 0.5
        run.note_seconds()
        assert noted.read_text() == "10.4"  # all that a kill would leave
    assert noted.read_text() == "10.9"
    clock[0] += 1000
    with RunFolder(tmp_path / "run") as run:
        assert run.seconds == pytest.approx(10.9)
        clock[0] += 3
        assert run.seconds == pytest.approx(13.9)


def test_a_damaged_note_of_time_is_no_reason_to_fail(tmp_path):
    with RunFolder(tmp_path / "run"):
        (tmp_path / "run/requests/seconds").write_text("x")
    with RunFolder(tmp_path / "run") as run:
        assert run.seconds == pytest.approx(0, abs=1)


# ---------------------------------------------------------------- data


def pair(number):
    prompt, chosen, rejected = f"Prompt number {number}", "Because.", "So."
    return dict.fromkeys(PAIR_SCHEMA.names) | {
        "id": pair_id(prompt, chosen, rejected),
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "judge_margin": 0.5,
    }


def line(number, reason=None):
    return dict.fromkeys(LEDGER_SCHEMA.names) | {
        "index": number,
        "prompt": f"Prompt number {number}",
        "responses": ["Because.", "So."],
        "scores": [1.0, None],
        "status": "dropped" if reason else "kept",
        "reason": reason,
    }


def both_splits():
    rows = [pair(number) for number in range(60, 120)]
    assert {split_of(row["prompt"][0]["content"]) for row in rows} == {"train", "test"}
    return rows


def test_files_carry_their_sha256(tmp_path):
    pairs, ledger = both_splits(), [line(number) for number in range(60, 120)]
    files = write_data(tmp_path, iter(pairs), iter(ledger))
    assert {config: list(splits) for config, splits in files.items()} == {
        "default": ["train", "test"],
        "ledger": ["train"],
    }
    names = [name for splits in files.values() for name in splits.values()]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name, stem in zip(names, ("train", "test", "ledger"), strict=True):
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        assert name == f"{stem}-{digest[:8]}.parquet"
    # rows and their order are kept, and the schema is the dataset's
    train, test, lines = (pq.read_table(tmp_path / name) for name in names)
    assert train.schema.equals(PAIR_SCHEMA)
    assert lines.schema.equals(LEDGER_SCHEMA)
    assert train.to_pylist() + test.to_pylist() == sorted(
        pairs, key=lambda row: split_of(row["prompt"][0]["content"]) == "test"
    )
    assert lines.to_pylist() == ledger


def test_the_same_rows_give_the_same_files(tmp_path):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    rows, ledger = both_splits(), [line(1)]
    first = write_data(tmp_path / "a", rows, ledger)
    assert write_data(tmp_path / "b", rows, ledger) == first
    other = write_data(tmp_path / "c", rows[1:], ledger)
    assert other["ledger"] == first["ledger"]
    assert other["default"]["train"] != first["default"]["train"]


@pytest.mark.parametrize(
    ("numbers", "splits"),
    [([1, 2, 3], ["train"]), ([81, 101], ["test"]), ([1, 81], ["train", "test"]), ([], [])],
)
def test_a_split_without_rows_is_not_written(tmp_path, numbers, splits):
    files = write_data(tmp_path, [pair(number) for number in numbers], [line(0, "verdict_tie")])
    assert list(files["default"]) == splits
    assert len(list(tmp_path.iterdir())) == len(splits) + 1


def test_no_rows_at_all_give_no_file(tmp_path):
    assert write_data(tmp_path, [], []) == {"default": {}, "ledger": {}}
    assert list(tmp_path.iterdir()) == []


def test_datasets_loads_the_files(tmp_path):
    from datasets import load_dataset

    (tmp_path / "data").mkdir()
    pairs = both_splits()
    files = write_data(tmp_path / "data", pairs, [line(number) for number in range(60, 120)])
    for config, count in (("default", len(pairs)), ("ledger", 60)):
        paths = {split: str(tmp_path / "data" / name) for split, name in files[config].items()}
        loaded = load_dataset("parquet", data_files=paths, cache_dir=str(tmp_path / config))
        assert {split: len(rows) for split, rows in loaded.items()} == {
            split: pq.read_metadata(path).num_rows for split, path in paths.items()
        }
        assert sum(len(rows) for rows in loaded.values()) == count
        if config == "default":
            found = [row for split in ("train", "test") for row in loaded[split]]
            assert sorted(found, key=str) == sorted(pairs, key=str)


# ---------------------------------------------------------------- finishing


def stage(run, version):
    """Stage a whole dataset whose every part says its version."""
    folder = run.stage()
    assert sorted(path.name for path in folder.rglob("*")) == ["assets", "data"]
    name = f"train-{hashlib.sha256(version.encode()).hexdigest()[:8]}.parquet"
    (folder / "data" / name).write_text(version)
    (folder / "assets" / "margins.png").write_text(version)
    counts = {"asked": 1, "kept": 1, "dropped": {}, "version": version}
    provenance = {"counts": counts, "identity": {}}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    (folder / "README.md").write_text(f"---\npath: data/{name}\n---\n{version}")
    return folder


def state(run):
    """Which version each part of the folder is of; None when it is not there."""
    parts = {
        "data": sorted(path.read_text() for path in run.path.glob("data/*")) or None,
        "assets": sorted(path.read_text() for path in run.path.glob("assets/*")) or None,
    }
    for name in ("README.md", "provenance.json"):
        path = run.path / name
        parts[name] = re.search(r"\bv[0-9]\b", path.read_text())[0] if path.exists() else None
    return parts


def whole(version):
    return {
        "data": [version],
        "assets": [version],
        "README.md": version,
        "provenance.json": version,
    }


def test_finish(run):
    run.write_ledger([line(0, "verdict_tie")])
    run.finish(stage(run, "v1"))
    assert state(run) == whole("v1")
    assert run.complete()["version"] == "v1"
    assert sorted(path.name for path in run.path.iterdir()) == [
        *("README.md", "assets", "data", "provenance.json", "requests")
    ]
    assert not (run.requests / "ledger.parquet").exists()  # that is for runs without a dataset

    run.finish(stage(run, "v2"))
    assert state(run) == whole("v2")
    assert [path.name for path in run.path.glob("data/*")] == [
        f"train-{hashlib.sha256(b'v2').hexdigest()[:8]}.parquet"
    ]


def test_a_stage_begins_empty(run):
    (stage(run, "v1") / "data" / "left over").write_text("x")
    assert sorted(path.name for path in run.stage().rglob("*")) == ["assets", "data"]


def test_the_card_comes_last(run, monkeypatch):
    moved = []
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def note(source, target, real=real):
            moved.append(Path(target).name)
            return real(source, target)

        monkeypatch.setattr(os, name, note)
    run.finish(stage(run, "v1"))
    assert moved == ["data", "assets", "provenance.json", "README.md"]


class Kill(BaseException):
    """A kill -9, as near as one process can come."""


def killed_at(monkeypatch, number):
    """Let `number` changes of the file system pass, and kill before the next."""
    calls = iter(range(number))
    for name in ("rename", "replace", "unlink", "rmdir", "remove", "mkdir"):
        real = getattr(os, name)

        def step(*paths, real=real, **more):
            if next(calls, None) is None:
                raise Kill
            return real(*paths, **more)

        monkeypatch.setattr(os, name, step)


@pytest.mark.parametrize("before", [None, "v1"])
def test_killed_anywhere_a_dataset_is_whole_or_not_there(tmp_path, monkeypatch, before):
    seen = []
    for number in range(100):
        with RunFolder(tmp_path / f"{before}-{number}") as run:
            if before:
                run.finish(stage(run, before))
            run.write_ledger([line(0, "verdict_tie")])
            made = stage(run, "v2")
            with monkeypatch.context() as patch:
                killed_at(patch, number)
                try:
                    run.finish(made)
                except Kill:
                    ended = False
                else:
                    ended = True
            found = state(run)
            seen.append(found["README.md"])
            if found["README.md"] is None:
                assert run.complete() is None
            else:
                assert found == whole(found["README.md"])
                assert run.complete()["version"] == found["README.md"]
            if found["README.md"] == "v2":
                assert not (run.requests / "ledger.parquet").exists()
        with RunFolder(run.path) as run:  # whatever was left, the next command ends well
            run.finish(stage(run, "v3"))
            assert state(run) == whole("v3")
            assert not (run.path / ".new").exists()
        if ended:
            break
    assert ended
    assert len(seen) > 6
    # Never there again once gone, until the new one is: old ..., none ..., new ...
    assert seen == sorted(seen, key=[before, None, "v2"].index)
    assert None in seen


def test_an_unfinished_run_keeps_its_ledger(run):
    ledger = [line(0, "verdict_tie"), line(1, "request_failed")]
    path = run.write_ledger(iter(ledger))
    assert path == run.path / "requests" / "ledger.parquet"
    assert pq.read_table(path).to_pylist() == ledger
    assert sorted(path.name for path in run.path.iterdir()) == ["requests"]
    assert sorted(path.name for path in run.requests.iterdir()) == ["ledger.parquet", "lock"]


@pytest.mark.parametrize(
    ("dropped", "complete"),
    [({}, True), ({"verdict_tie": 3}, True), ({"request_failed": 1}, False)],
)
def test_failed_requests_are_something_left(run, dropped, complete):
    """The same command asks them again."""
    counts = {"asked": 5, "kept": 2, "dropped": dropped}
    made = stage(run, "v1")
    (made / "provenance.json").write_text(json.dumps({"counts": counts, "identity": {}}))
    assert run.complete() is None  # no card, no dataset
    run.finish(made)
    assert run.complete() == (counts if complete else None)


def test_data_that_is_gone_or_changed_is_something_left(run):
    run.finish(stage(run, "v1"))
    (data,) = (run.path / "data").iterdir()
    data.write_text("changed")
    assert run.complete() is None
    data.unlink()
    assert run.complete() is None


def test_without_its_config_a_dataset_still_says_how_it_was_made(run):
    made = stage(run, "v1")
    counts = {"asked": 1, "kept": 1, "dropped": {}}
    found = {"counts": counts, "identity": {"seed": 0}}
    (made / "provenance.json").write_text(json.dumps(found))
    run.finish(made)
    run.check_identity({"seed": 0})
    with pytest.raises(UsageError, match="seed: 0 there, 5 here"):
        run.check_identity({"seed": 5})


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{}",
        "[]",
        '{"counts": {"asked": "x", "kept": 1, "dropped": {}}}',
        '{"counts": 5}',
        '{"counts": {}}',
        "{",
    ],
)
def test_a_card_without_provenance(run, text):
    run.card.write_text("card")
    if text is not None:
        run.provenance.write_text(text)
    with pytest.raises(SelfsynthError, match=r"provenance\.json cannot be read \(\w+\)"):
        run.complete()


# ---------------------------------------------------------------- a place for workers


def test_a_workplace_takes_sockets_however_deep_the_folder_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no-such-folder"))
    deep = tmp_path / ("x" * 100) / "run"
    with RunFolder(deep) as run:
        with run.workplace() as folder, socket.socket(socket.AF_UNIX) as listener:
            (folder / "some").mkdir()
            (folder / "some" / "file").write_text("text")
            listener.bind(str(folder / "some" / "listener-01234567"))
            assert len(list(run.requests.glob("work-*/some/file"))) == 1
            assert in_a_fork((folder / "some/file").read_text) == 0
        assert {path.name for path in run.requests.iterdir()} == {"lock"}


def in_a_fork(work):
    if (child := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_what_a_kill_leaves_is_gone_with_the_next_command(tmp_path):
    code = (
        HOLDER
        + """
    with run.workplace() as folder:
        (folder / "file").write_text("text")
        (run.stage() / "data" / "half.part").write_text("text")
        print("there", flush=True)
        time.sleep(60)
    """
    )
    process = start(code, tmp_path / "run")
    process.kill()
    process.communicate()
    run = RunFolder(tmp_path / "run")
    assert list(run.requests.glob("work-*/file")) and (run.path / ".new").exists()
    with run:
        assert {path.name for path in run.path.iterdir()} == {"requests"}
        assert {path.name for path in run.requests.iterdir()} == {"lock"}


def test_a_full_disk_is_named(tmp_path):
    message = f"{tmp_path}/run cannot be written: No space left on device; once there is space, the"
    with (
        pytest.raises(SelfsynthError, match=re.escape(message)),
        RunFolder(tmp_path / "run") as run,
    ):
        (run.stage() / "data" / "half.part").write_text("text")
        raise OSError(errno.ENOSPC, "Error writing bytes to file")  # as pyarrow says it
    assert {path.name for path in run.path.iterdir()} == {"requests"}
    with RunFolder(tmp_path / "run"):  # and the lock is free again
        pass


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        OSError(errno.ENOSPC, "full", "/elsewhere/x"),
    ],
    ids=["another error", "another disk"],
)
def test_other_errors_pass_through(error, tmp_path):
    with pytest.raises(OSError) as caught, RunFolder(tmp_path / "run"):
        raise error
    assert caught.value is error


def test_the_time_is_not_worth_an_error(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "run") as run:
        run._time.with_name("seconds.part").mkdir()  # in the way
        run._noted -= 2
        run.note_seconds()
    assert not run._time.exists()


# ---------------------------------------------------------------- stops

STOPPED_AT_THE_END = """
    import os, signal, sys
    from pathlib import Path
    import typer
    from selfsynth import runs
    from selfsynth.errors import command

    app = typer.Typer(add_completion=False)
    number = int(os.environ["NUMBER"])

    def stopped(move):
        def run(*places):
            signal.raise_signal(number)
            move(*places)
            signal.raise_signal(number)
        return run

    @app.command()
    def main(folder: Path):
        with runs.RunFolder(folder) as run:
            stage = run.stage()
            (stage / "provenance.json").write_text("{}")
            (stage / "README.md").write_text("card")
            os.rename, os.replace = stopped(os.rename), stopped(os.replace)
            run.finish(stage)
        print("done", flush=True)

    command(app)()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_during_the_last_moves_comes_too_late(tmp_path, number, monkeypatch):
    monkeypatch.setenv("NUMBER", str(int(number)))
    code = textwrap.dedent(STOPPED_AT_THE_END)
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"requests", "data", "assets", "provenance.json", "README.md"}
