"""The store: what is put comes back, and a file that is damaged or cannot be written is named."""

import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfsynth.errors import SelfsynthError
from selfsynth.serving import Completion, Request, Store
from selfsynth.serving.store import key_of

ROOT = Path(__file__).parents[3]
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a busy disk makes syncing slow
fuzz = settings(derandomize=True, deadline=None, database=None, max_examples=200)

# Half a surrogate pair can come in a user's JSON; as a key or on disk it must not end the run.
texts = st.text(st.characters(codec=None, categories=None), max_size=20)
counts = st.none() | st.integers(0, 2**70)
logprobs = st.lists(
    st.tuples(texts, st.floats(allow_nan=False)).map(list), min_size=1, max_size=3
)  # fmt: skip
requests = st.builds(
    Request,
    messages=st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=3),
    max_tokens=st.integers(1, 2**40),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    seed=st.integers(0, 2**70),
    top_logprobs=st.integers(0, 20),
    repeat=st.integers(0, 5),
)
completions = st.builds(
    Completion,
    text=st.none() | texts,
    finish_reason=st.none() | texts,
    prompt_tokens=counts,
    completion_tokens=counts,
    top_logprobs=st.none() | logprobs,
    model=st.none() | texts,
)
ONE = Request([{"role": "user", "content": "a"}], 64, 0.6, 0.9, seed=1)


def rows(n, text="answer"):
    """Rows to put; each is about as large as a page."""
    asked = [ONE._replace(seed=seed) for seed in range(n)]
    return [(key_of("m", one), "m", one, Completion(f"{text} {one.seed} " * 200)) for one in asked]


def held(path):
    """Everything in a store, by key."""
    with Store(path) as store:
        return {key_of(model, one): answer for model, one, answer in store}


# ---------------------------------------------------------------- putting and getting


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "answers.sqlite"
    with Store(path) as store, Store(path) as reader:
        yield store, reader


@fuzz
@given(st.lists(st.tuples(texts, requests, completions), max_size=4))
def test_what_is_put_comes_back(shared, asked):
    store, reader = shared
    put = [(key_of(*one[:2]), *one) for one in asked]
    known = store.get(key for key, *_ in put)
    store.put((key, "m", one, answer) for key, _, one, answer in put)
    first = {}
    for key, _, _, answer in put:  # the first answer to a key stays
        first.setdefault(key, known.get(key, answer))
    assert store.get(first) == reader.get(first) == first


def test_many_keys(tmp_path):
    path = tmp_path / "answers.sqlite"
    with Store(path) as store:
        put = rows(1300)
        store.put(put)
        store.put([])
        found = store.get([key for key, *_ in put] + ["0" * 64])
        assert found == {key: answer for key, _, _, answer in put}
        assert store.get([]) == {}
    assert held(path) == found


def test_iteration_is_in_the_order_of_keys(tmp_path):
    with Store(tmp_path / "answers.sqlite") as store:
        put = rows(50)
        store.put(put)
        expected = [(model, one, answer) for _, model, one, answer in sorted(put)]
        assert list(store) == expected
        for _ in store:  # and writing meanwhile is no harm
            store.put([("z" * 64, "m", ONE, Completion("late"))])
        assert len(list(store)) == 51


def test_the_first_answer_stays(tmp_path):
    with Store(tmp_path / "answers.sqlite") as store:
        key = key_of("m", ONE)
        for text in ("first", "second"):
            store.put([(key, "m", ONE, Completion(text))])
        assert store.get([key]) == {key: Completion("first")}


# ---------------------------------------------------------------- keys


@fuzz
@given(requests, st.data())
def test_key_depends_on_every_field(one, data):
    field = data.draw(st.sampled_from(Request._fields))
    other = one._replace(**{field: getattr(data.draw(requests), field)})
    same = getattr(one, field) == getattr(other, field)
    assert (key_of("m", one) == key_of("m", other)) == same
    key = key_of("m", one)
    assert len(key) == 64 and set(key) <= set("0123456789abcdef")


@fuzz
@given(texts, texts)
def test_key_depends_on_the_model(one, other):
    assert (key_of(one, ONE) == key_of(other, ONE)) == (one == other)


def test_key_is_frozen():
    """Whoever changes it makes everybody pay again, and has to change this too."""
    assert key_of("sha256:0", ONE) == (
        "85a7090464b9f5f4ccb4c0480e9850f7c816adc8263a8a0db24d7e16b4e28fc7"
    )
    usual = Request(*ONE[:5], top_logprobs=0, repeat=0)
    assert key_of("m", usual) == key_of("m", ONE)  # so a later field can have a default too
    swapped = ONE._replace(messages=[{"content": "a", "role": "user"}])
    assert key_of("m", swapped) == key_of("m", ONE)  # the order within a message says nothing


# ---------------------------------------------------------------- damage


def damaged_by(path, change):
    """A store of 50 answers whose file is then changed."""
    with Store(path) as store:
        store.put(rows(50))
    data = path.read_bytes()
    assert data[:6] == b"SQLite" and not Path(f"{path}-wal").exists()
    path.write_bytes(change(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:100],
        lambda data: b"not a database, " * 500,
        lambda data: b"\0" * len(data),
        lambda data: os.urandom(len(data)),
        lambda data: data[:4096] + b"\xff" * 40_000 + data[44_096:],
    ],
    ids=["half", "head", "text", "zeros", "noise", "pages"],
)
def test_a_damaged_file_is_set_aside(change, tmp_path):
    path = tmp_path / "answers.sqlite"
    for number in (1, 2):
        damaged_by(path, change)
        bad = path.read_bytes()
        with pytest.raises(SelfsynthError, match=f"is damaged .*damaged-{number};") as caught:
            Store(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        assert not path.exists()
        assert path.with_name(f"answers.sqlite.damaged-{number}").read_bytes() == bad
    with Store(path) as store:  # the second time it works
        store.put(rows(2))
    assert len(held(path)) == 2


@settings(fuzz, max_examples=100)
@given(st.floats(0, 1), st.binary(min_size=1, max_size=300))
def test_any_damage_is_one_line(where, noise):
    """Bytes overwritten anywhere give the same answers, or one line; never a traceback."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "answers.sqlite"

        def change(data):
            start = int(where * (len(data) - len(noise)))
            return data[:start] + noise + data[start + len(noise) :]

        damaged_by(path, change)
        keys = [key for key, *_ in rows(50)]
        try:
            with Store(path) as store:
                store.get(keys)
                list(store)
                store.put(rows(60))
        except SelfsynthError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            if path.exists():  # then it is named again
                with pytest.raises(SelfsynthError):
                    held(path)
            else:
                assert held(path) == {}


def test_an_unreadable_answer_is_set_aside_too(tmp_path):
    path = tmp_path / "answers.sqlite"
    with Store(path) as store:
        store.put(rows(2))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE answers SET answer = substr(answer, 1, 20)")
    db.close()
    with pytest.raises(SelfsynthError, match="damaged-1"), Store(path) as store:
        list(store)
    assert held(path) == {}


# ---------------------------------------------------------------- no room, no right


@pytest.mark.parametrize("n", [1, 200])
def test_a_full_disk_is_one_line_and_costs_nothing_stored(n, tmp_path):
    path = tmp_path / "answers.sqlite"
    with Store(path) as store:
        store.put(rows(3))
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        for _ in range(2):  # the failed transaction is not left open
            with pytest.raises(SelfsynthError, match=r"cannot be written: .*full") as caught:
                store.put(rows(n + 50, "other"))
            assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert len(list(store)) == 3
        store._db.execute("PRAGMA max_page_count = 100000")
        store.put(rows(10))
    assert len(held(path)) == 10


LIMITED = """
import resource, sys
from pathlib import Path
from selfsynth.errors import SelfsynthError
from selfsynth.serving import Store
from tests.selfsynth.serving.test_store import rows

with Store(Path(sys.argv[1])) as store:
    store.put(rows(30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    try:
        for n in range(100):
            store.put((f"{n} {key}", *rest) for key, *rest in rows(20))
    except SelfsynthError as error:
        print(error)
"""


def test_a_write_that_the_system_refuses(tmp_path):
    """The same at the system's own limit, by the size that a file of the process may have."""
    path = tmp_path / "answers.sqlite"
    command = [sys.executable, "-c", LIMITED, path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{path} cannot be written: ")
    assert len(held(path)) >= 30


FORBIDDEN = """
import os, sys
from pathlib import Path
from selfsynth.errors import SelfsynthError
from selfsynth.serving import Store
from tests.selfsynth.serving.test_store import rows

if os.getuid() == 0:
    os.setuid(65534)
for path in sys.argv[1:]:
    try:
        with Store(Path(path)) as store:
            store.put(rows(1))
    except SelfsynthError as error:
        print(error)
"""


def test_a_folder_that_may_not_be_written():
    with tempfile.TemporaryDirectory() as folder:
        new, old = Path(folder) / "new.sqlite", Path(folder) / "old.sqlite"
        with Store(old) as store:
            store.put(rows(3))
        old.chmod(0o444)
        Path(folder).chmod(0o555)
        try:
            command = [sys.executable, "-c", FORBIDDEN, new, old]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        finally:
            Path(folder).chmod(0o755)
        assert done.stderr == ""
        first, second = done.stdout.splitlines()
        assert first.startswith(f"{new} cannot be opened: ")
        assert second.startswith(f"{old} cannot be ")
        assert [path.name for path in Path(folder).iterdir()] == ["old.sqlite"]
        assert len(held(old)) == 3


def test_another_process_that_writes(tmp_path):
    path = tmp_path / "answers.sqlite"
    with Store(path) as store, Store(path) as other:
        store._db.execute("PRAGMA busy_timeout = 10")
        other._db.execute("BEGIN IMMEDIATE")
        with pytest.raises(SelfsynthError, match=r"cannot be written: .*locked"):
            store.put(rows(2))
        other._db.execute("COMMIT")
        store.put(rows(3))
    assert len(held(path)) == 3


def test_no_such_folder(tmp_path):
    with pytest.raises(SelfsynthError, match="cannot be opened"):
        Store(tmp_path / "none" / "answers.sqlite")


def test_other_stores_are_only_read(tmp_path):
    rows = [(key_of("m", ONE._replace(seed=i)), "m", ONE._replace(seed=i), Completion(str(i)))
            for i in range(1200)]  # fmt: skip
    with Store(tmp_path / "a.sqlite") as one, Store(tmp_path / "b.sqlite") as other:
        one.put(rows[:700])
        other.put(rows[600:])
    before = [(tmp_path / name).read_bytes() for name in ("a.sqlite", "b.sqlite")]
    lent = [tmp_path / "a.sqlite", tmp_path / "b.sqlite"]
    keys = [key for key, *_ in rows]
    with Store(tmp_path / "own.sqlite", lent) as store:
        found = store.get([*keys, "f" * 64])
        assert found == {key: answer for key, _, _, answer in rows}
    assert [(tmp_path / name).read_bytes() for name in ("a.sqlite", "b.sqlite")] == before
    with Store(tmp_path / "own.sqlite") as store:
        assert store.get(keys) == found  # copied, so the others may go


@pytest.mark.parametrize("content", [None, b"", b"no database at all", b"SQLite format 3\0" * 99])
def test_another_store_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "other.sqlite").write_bytes(content)
    with pytest.raises(SelfsynthError) as caught:
        Store(tmp_path / "own.sqlite", [tmp_path / "other.sqlite"])
    assert "other.sqlite" in str(caught.value) and "\n" not in str(caught.value)
    assert content is None or (tmp_path / "other.sqlite").read_bytes() == content
