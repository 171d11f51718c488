"""`python -m hub_cards`: show, diff and verify, on the Hub and in folders."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hub_cards.__main__ import app
from hub_cards.comparison import compare, lines_of
from hub_cards.parts import join_card, split_card
from hub_cards.publish import publish
from hub_cards.verify import verify
from selfsynth.schema import PAIR_SCHEMA
from tests.conftest import run_script
from tests.hub_cards.test_cards import make_rows, write

REPO = "me/pairs"


@pytest.fixture
def command(hub, in_process):
    """`hub_cards …` in this process, against the local Hub."""

    def run(*arguments, status=0):
        said = in_process(app, *arguments, status=status)
        return SimpleNamespace(stdout=said.out, stderr=said.err)

    return run


def test_as_a_command_of_its_own(hub, make_run, tmp_path):
    environment = {**hub.environment, "HF_HOME": str(tmp_path / "hf-home")}
    flags = ["--repo-id", REPO, "--json"]
    done = run_script("-m", "hub_cards", "publish", make_run(), *flags, **environment)
    assert json.loads(done.stdout)["commit"] == hub.tags(REPO)["v1"]
    wrong = ["-m", "hub_cards", "verify", f"{REPO}@v9"]
    assert "error: dataset" in run_script(*wrong, status=1, **environment).stderr


def test_publish_show_diff_verify(hub, make_run, command):
    one, two = make_run("one"), make_run("two", count=50, temperature=0.9)
    said = command("publish", one, "--repo-id", REPO).stderr
    commit = hub.tags(REPO)["v1"]
    for line in (
        f"url      {hub.url}/datasets/{REPO}/tree/v1",
        "tag      v1",
        f"commit   {commit}",
    ):
        assert line in said.splitlines()
    assert f'pairs = load_dataset("{REPO}", revision="v1")' in said
    assert "v1 holds the same already" in command("publish", one, "--repo-id", REPO).stderr
    command("publish", two, "--repo-id", REPO)

    shown = json.loads(command("show", REPO, "--json").stdout)
    assert [row["tag"] for row in shown] == ["v1", "v2"]
    assert [row["commit"] for row in shown] == list(hub.tags(REPO).values())
    assert "temperature 0.6 → 0.9" in shown[1]["changes"]
    only = command("show", REPO, "--revision", "v1")
    assert commit[:12] in only.stderr and "v2" not in only.stderr and only.stdout == ""
    assert "unpublished" in command("show", one).stderr

    of_hub = json.loads(command("diff", REPO, "v1", "v2", "--json").stdout)
    assert of_hub == json.loads(command("diff", one, f"{REPO}@v2", "--json").stdout)
    assert of_hub == json.loads(command("diff", one, two, "--json").stdout)
    assert ["temperature", 0.6, 0.9] in of_hub["settings"]
    # The first 40 rows are drawn from the same dice.
    assert of_hub["removed"] == [] and of_hub["same"] and len(of_hub["added"]) >= 5

    for source in ([REPO, "--revision", "v1"], [f"{REPO}@{commit}"], [one]):
        assert "card, provenance and data agree (40 asked for" in command("verify", *source).stderr


def test_what_cannot_be_shown(hub, make_run, command, tmp_path):
    publish(make_run(), REPO)
    hub.add(REPO, {"provenance.json": None})
    hub.add("other/secret", {"README.md": b"x"}, private=True)
    hub.add("me/gone", {"README.md": b"x"})
    hub.delete("me/gone")
    table = [
        (["show", REPO, "--revision", "v9"], 1, "no such revision"),
        (["verify", f"{REPO}@v9"], 1, "no such revision"),
        (["verify", f"{REPO}@{'0' * 40}"], 1, "no such revision"),
        (["diff", REPO, "v1", "v9"], 1, "me/pairs@v9: no such revision"),
        (["verify", "me/gone"], 1, "me/gone: no such repository"),
        (["show", "other/secret"], 1, "other/secret: no such repository"),
        (["show", "me/no such"], 2, "not a Hub id"),
        (["diff", REPO], 2, "diff takes"),
        (["diff", REPO, "v1", "main"], 1, "error: me/pairs@main holds no dataset of selfsynth"),
        (["verify", tmp_path], 1, "does not hold together"),
        (["show", tmp_path], 2, "holds no finished dataset"),
        (["publish", tmp_path, "--repo-id", REPO], 2, "holds no finished dataset"),
        (["show", REPO, "--repo-type", "space"], 2, "must be dataset or model"),
    ]
    for arguments, status, words in table:
        lines = command(*arguments, status=status).stderr.strip().splitlines()
        assert lines[-1].startswith("error: ") and words in lines[-1], arguments


def test_each_file_is_asked_for_once(hub, make_run, command):
    publish(make_run(), REPO)
    before = len(hub.requests)
    command("verify", REPO, "--revision", "v1")
    # What is in LFS is asked for by its SHA-256, at another origin.
    files = r"(/resolve/|/[0-9a-f]{64}$)"
    asked = [path for method, path in hub.requests[before:] if method == "GET"]
    got = [path for path in asked if re.search(files, path)]
    assert len(got) == len(set(got)) >= 5


# ---------------------------------------------------------------- verify


def test_rows_flipped_added_and_removed(tmp_path):
    pairs, ledger = make_rows(40)
    write(tmp_path / "one", pairs, ledger)
    flipped = {**pairs[0], "chosen": pairs[0]["rejected"], "rejected": pairs[0]["chosen"]}
    gone = pairs[1]["id"]
    kept = [row if row["pair_id"] != gone else {**row, "status": "dropped", "pair_id": None,
            "reason": "verdict_tie"} for row in ledger]  # fmt: skip
    write(tmp_path / "two", [flipped, *pairs[2:]], kept)
    found = compare(tmp_path / "one", tmp_path / "two")
    assert (found["flipped"], found["removed"], found["added"]) == ([pairs[0]["id"]], [gone], [])
    assert found["same"] == len(pairs) - 2 and found["settings"] == []
    assert found["statistics"]["kept"] == [len(pairs), len(pairs) - 1]
    lines = "\n".join(lines_of(found))
    assert f"flipped: {pairs[0]['id']}" in lines and "settings: the same" in lines
    assert compare(tmp_path / "two", tmp_path / "one")["added"] == [gone]


def change(path: Path, old: str, new: str):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def rewritten(run: Path, change_rows):
    """Rewrite the training pairs under their old name."""
    (path,) = (run / "data").glob("train-*")
    rows = change_rows(pq.read_table(path).to_pylist())
    pq.write_table(pa.Table.from_pylist(rows, PAIR_SCHEMA), path)


SPOILT = {
    "a row less": (lambda run: rewritten(run, lambda rows: rows[1:]), "SHA-256 differs"),
    "another answer": (
        lambda run: rewritten(
            run,
            lambda rows: [
                {**rows[0], "chosen": [{"role": "assistant", "content": "x"}]},
                *rows[1:],
            ],
        ),
        "is not that of its texts",
    ),
    "another schema": (
        lambda run: pq.write_table(
            pq.read_table(next((run / "data").glob("train-*"))).drop_columns("persona"),
            next((run / "data").glob("train-*")),
        ),
        "has another schema",
    ),
    "a file gone": (
        lambda run: next((run / "data").glob("ledger-*")).unlink(),
        "named by the card and missing",
    ),
    "a file too much": (
        lambda run: (run / "data/train-00000000.parquet").write_bytes(b""),
        "is there and not named",
    ),
    "no parquet": (
        lambda run: next((run / "data").glob("train-*")).write_bytes(b"PAR1"),
        "is no parquet file",
    ),
    "counts": (
        lambda run: change(run / "provenance.json", '"asked": 40', '"asked": 41'),
        "provenance says asked 41",
    ),
    "the sum": (
        lambda run: change(run / "README.md", "40 asked for = ", "41 asked for = "),
        "the card says '41 asked for",
    ),
    "rows on the card": (
        lambda run: (run / "README.md").write_text(
            re.sub("num_examples: 40", "num_examples: 39", (run / "README.md").read_text())
        ),
        "the card says 39 rows in ledger/train",
    ),
    "the table": (
        lambda run: (run / "README.md").write_text(
            re.sub(r"\| kept \| \d+ \|", "| kept | 7 |", (run / "README.md").read_text())
        ),
        "the card's ledger says",
    ),
    "size": (
        lambda run: change(run / "README.md", "- n<1K", "- 1K<n<10K"),
        "the card says size",
    ),
    "markers": (
        lambda run: change(run / "README.md", "<!-- selfsynth:begin -->", ""),
        "lost the markers",
    ),
    "no YAML": (lambda run: change(run / "README.md", "tags:", "tags: ["), "cannot be read"),
    "a picture": (lambda run: (run / "assets/ledger.png").unlink(), "shows assets/ledger.png"),
    "no card": (lambda run: (run / "README.md").unlink(), "README.md is missing"),
    "no provenance": (
        lambda run: (run / "provenance.json").write_text("[]"),
        "is no provenance",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_does_not_agree_is_named(make_run, name):
    run = make_run()
    assert verify(run)[0] == []
    spoil, words = SPOILT[name]
    spoil(run)
    problems, _ = verify(run)
    assert any(words in problem for problem in problems), problems


LIKE_A_CARD = """\
path: data/train.csv
- path: data/train-00000000.parquet
| kept | 5 | 10.0 % | a row |
41 asked for = 41 kept + 0 dropped.
![A picture](assets/cat.png)
````
"""


def test_what_a_model_wrote_is_not_taken_for_the_card(hub, tmp_path):
    pairs, ledger = make_rows(4)
    for row in [*pairs, *ledger]:
        row["persona"] = LIKE_A_CARD
    write(tmp_path / "run", pairs, ledger)
    assert LIKE_A_CARD in (tmp_path / "run/README.md").read_text()
    assert verify(tmp_path / "run")[0] == []
    assert publish(tmp_path / "run", REPO).tag == "v1"


def spoil_metadata(run, key, value):
    metadata, text = split_card((run / "README.md").read_text())
    (run / "README.md").write_text(join_card(metadata | {key: value}, text))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("configs", "all of them"),
        ("configs", ["default"]),
        ("configs", [{"config_name": "default", "data_files": "data/*"}]),
        ("configs", [{"config_name": "default", "data_files": [{"split": [1], "path": [2]}]}]),
        ("configs", [{"config_name": "default", "data_files": [{"path": "../../etc/hosts"}]}]),
        ("configs", [{"config_name": ["default"], "data_files": None}]),
        ("dataset_info", "much"),
        ("dataset_info", ["default"]),
        ("dataset_info", [{"config_name": "default", "splits": 3}]),
        ("dataset_info", [{"config_name": ["default"], "splits": [{"name": [1]}]}]),
        ("size_categories", {"n": 1}),
    ],
)
def test_metadata_of_any_shape_is_a_problem_and_no_crash(make_run, key, value):
    run = make_run()
    spoil_metadata(run, key, value)
    assert verify(run)[0] != []


@pytest.mark.parametrize("text", ["null", "7", '{"counts": [1]}', '{"counts": {"asked": {}}}'])
def test_provenance_of_any_shape_is_a_problem_and_no_crash(make_run, text):
    run = make_run()
    (run / "provenance.json").write_text(text)
    assert any("provenance" in problem for problem in verify(run)[0])


def test_bytes_that_flipped_are_a_problem_and_no_crash(make_run):
    run, dice = make_run(), random.Random(0)
    for path in (run / "data").iterdir():
        whole = path.read_bytes()
        for _ in range(40):
            flipped = bytearray(whole)
            for _ in range(3):
                flipped[dice.randrange(len(whole))] ^= 255
            path.write_bytes(flipped)
            assert any("SHA-256 differs" in problem for problem in verify(run)[0])
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "rows",
    [
        [{"id": "x", "prompt": "words"}],
        [{"id": None, "prompt": [None]}],
        [{"status": [1], "reason": {"a": 1}, "index": [2]}],
        pa.Table.from_pylist([dict.fromkeys(PAIR_SCHEMA.names)], PAIR_SCHEMA),
        pa.Table.from_pylist([{"id": "x", "prompt": [None]}], PAIR_SCHEMA),
        pa.Table.from_pylist([{"id": "x", "prompt": [{"role": "user"}]}], PAIR_SCHEMA),
    ],
)
def test_rows_of_any_shape_are_a_problem_and_no_crash(make_run, rows):
    run = make_run()
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    for path in (run / "data").iterdir():
        pq.write_table(table, path)
    assert any("has another schema" in problem for problem in verify(run)[0])


def test_a_version_of_which_nothing_is_known_is_not_the_first(hub, make_run, command):
    publish(make_run("one"), REPO)
    hub.add(REPO, {"provenance.json": b"gone"}, tags=["v2"])
    shown = json.loads(command("show", REPO, "--json").stdout)
    assert [row["changes"] for row in shown] == [["first version"], []]


def test_the_folder_of_a_model_is_shown(tmp_path, command):
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "provenance.json").write_text('{"identity": {}, "counts": {}}')
    assert "unknown" in command("show", tmp_path, "--repo-type", "model").stderr


def test_a_problem_of_a_thousand_rows_is_told_in_a_few_lines(make_run):
    run = make_run(count=300)
    rewritten(run, lambda rows: [{**row, "id": "0" * 16} for row in rows])
    assert len(verify(run)[0]) < 60
