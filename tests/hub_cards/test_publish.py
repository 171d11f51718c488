"""Publishing to a local Hub: one commit and one tag a version, whatever goes wrong on the way."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from datasets import load_dataset
from huggingface_hub import HfApi, close_session

from hub_cards import Result, write_model_card
from hub_cards.publish import check, publish, secrets_in
from hub_cards.verify import verify
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.stats import wilson
from tests.conftest import ROOT, run_script
from tests.hub_cards.test_cards import make_rows, write

REPO = "me/pairs"


def titles(hub):
    return [commit.title for commit in hub.commits(REPO)]


def publishes(hub):
    """Return the commits that hold a version, oldest first."""
    return [one for one in reversed(hub.commits(REPO)) if "selfsynth-content" in one.message]


def test_push_tag_push_tag_and_the_old_rows_are_loaded(hub, make_run, tmp_path):
    one, two = make_run("one"), make_run("two", count=50, seed=1)
    first, second = publish(one, REPO), publish(two, REPO)
    assert (first.tag, second.tag, first.new, second.new) == ("v1", "v2", True, True)
    assert hub.tags(REPO) == {"v1": first.commit, "v2": second.commit}
    assert [title.split(":")[0] for title in titles(hub)] == ["v2", "v1", "initial commit"]
    # Data, card, provenance and pictures are in the one commit, and nothing else is.
    files = hub.files(REPO, "v1")
    expected = {str(path.relative_to(one)) for path in one.rglob("*") if path.is_file()}
    assert set(files) == expected | {".gitattributes"}
    for name in expected - {"README.md"}:
        assert files[name] == (one / name).read_bytes()
    # What is gone is removed: no data file of the first version is left in the second.
    assert set(hub.files(REPO, "v2")) - {".gitattributes"} == {
        str(path.relative_to(two)) for path in two.rglob("*") if path.is_file()
    }
    # A plain user of datasets, with none of our code and an empty cache each time.
    for folder, revision in ((one, "v1"), (two, "v2"), (one, first.commit)):
        code = (
            "import json, sys; from datasets import load_dataset\n"
            f"pairs = load_dataset({REPO!r}, revision={revision!r})\n"
            f"ledger = load_dataset({REPO!r}, name='ledger', revision={revision!r})['train']\n"
            "print(json.dumps([sorted(i for s in pairs.values() for i in s['id']), len(ledger)]))"
        )
        home = tmp_path / f"home-{revision}"
        done = run_script("-c", code, HF_HOME=str(home), **hub.environment)
        ids, ledger = json.loads(done.stdout)
        local = load_dataset(str(folder))
        assert ids == sorted(one for split in local.values() for one in split["id"])
        assert ledger == (40 if folder == one else 50)


def test_the_card_says_how_to_load_the_version_and_what_was_before(hub, make_run):
    publish(make_run("one"), REPO)
    publish(make_run("two", count=50, seed=1, temperature=0.9), REPO)
    card = hub.files(REPO, "v2")["README.md"].decode()
    assert f'pairs = load_dataset("{REPO}", revision="v2")' in card
    assert f'ledger = load_dataset("{REPO}", revision="v2", name="ledger")["train"]' in card
    assert "this folder" not in card
    table = card.split("## Versions")[1].split("\n\n")[1].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in table] == ["`v2`", "`v1`"]
    assert "temperature 0.6 → 0.9" in table[0] and "num_prompts 40 → 50" in table[0]
    assert hub.tags(REPO)["v1"][:12] in table[1] and "first version" in table[1]


def test_the_same_content_is_published_once(hub, make_run):
    run = make_run()
    first = publish(run, REPO)
    before = titles(hub)
    again = publish(run, REPO)
    assert (again.tag, again.commit, again.new) == ("v1", first.commit, False)
    assert titles(hub) == before
    # The same rows of another identity, and going back to an older version, are new versions.
    assert publish(make_run("other", temperature=0.7), REPO).tag == "v2"
    assert publish(run, REPO).tag == "v3"


def test_requests_config_and_log_stay_at_home(hub, make_run):
    run = make_run()
    (run / "requests").mkdir()
    for name in ("requests/store.sqlite", "config.yaml", "run.log", "data/left.parquet", "x.txt"):
        (run / name).write_text("secret")
    publish(run, REPO)
    assert not [name for name, data in hub.files(REPO).items() if data == b"secret"]


# ---------------------------------------------------------------- faults


@pytest.fixture
def second(hub, make_run):
    """A second version to publish, and the number of requests that it takes on `me/base`."""
    publish(make_run("one"), "me/base")
    hub.copy("me/base", "me/count")
    before = len(hub.requests)
    two = make_run("two", seed=1)
    publish(two, "me/count")
    steps = len(hub.requests) - before
    assert steps > 8
    return two, steps


@pytest.mark.parametrize("fault", [500, "drop", "late"])
def test_a_fault_at_each_step_is_got_over_by_the_same_command(hub, second, fault):
    two, steps = second
    for step in range(steps + 1):
        repo = f"me/step{step}"
        hub.copy("me/base", repo)
        faulty = len(hub.requests) + step
        # From this step on nothing works: the command gives up and says so, or it was done.
        hub.fault = lambda method, path, number, at=faulty: fault if number > at else None
        done = False
        try:
            done = publish(two, repo).new
        except SelfsynthError as error:
            assert "\n" not in str(error)
        hub.fault = None
        state = hub.tags(repo)
        assert done == ("v2" in state) or fault == "late"
        finished = publish(two, repo)
        assert finished.tag == "v2"
        assert finished.new or done or fault == "late"
        assert list(hub.tags(repo)) == ["v1", "v2"]
        made = [one for one in hub.commits(repo) if "selfsynth-content" in one.message]
        assert len(made) == 2, f"step {step}"
        assert hub.tags(repo)["v2"] == made[0].oid
        assert "provenance.json" in hub.files(repo, "v2")


@pytest.mark.parametrize("fault", [500, 429, 412, "drop", "late"])
def test_one_fault_at_each_step_is_not_even_seen(hub, second, fault):
    two, steps = second
    for step in range(steps):
        repo = f"me/step{step}"
        hub.copy("me/base", repo)
        at = len(hub.requests) + step + 1
        hub.fault = lambda method, path, number, at=at: fault if number == at else None
        assert publish(two, repo).tag == "v2", step
        hub.fault = None
        made = [one for one in hub.commits(repo) if "selfsynth-content" in one.message]
        assert [hub.tags(repo)[tag] for tag in ("v2", "v1")] == [one.oid for one in made]


def test_six_publishers_at_once_make_six_versions(hub, make_run, tmp_path):
    runs = [make_run(f"run{seed}", seed=seed) for seed in range(6)]
    environment = {**os.environ, **hub.environment}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "hub_cards", "publish", str(run), "--repo-id", REPO, "--json"],
            cwd=ROOT,
            env={**environment, "HF_HOME": str(tmp_path / f"home{seed}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed, run in enumerate(runs)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, outputs
    tags = hub.tags(REPO)
    assert sorted(tags) == [f"v{number}" for number in range(1, 7)]
    for run, (out, _) in zip(runs, outputs, strict=True):
        said = json.loads(out)
        files = hub.files(REPO, said["tag"])
        assert tags[said["tag"]] == said["commit"]
        assert files["provenance.json"] == (run / "provenance.json").read_bytes()
        assert f'revision="{said["tag"]}"' in files["README.md"].decode()
    made = publishes(hub)
    assert [one.oid for one in made] == [tags[f"v{number}"] for number in range(1, 7)]
    listed = made[-1].files["README.md"].decode().split("## Versions")[1].split("\n\n")[1]
    assert [row.split("|")[1].strip() for row in listed.splitlines()[2:]] == [
        f"`v{number}`" for number in range(6, 0, -1)
    ]


def test_main_moves_between_our_commit_and_our_tag(hub, make_run):
    moved = []

    def move(method, path):
        if "/tag/" in path and not moved:
            moved.append(hub.add(REPO, {"NOTES.md": b"a person's"}, message="notes"))

    hub.before = move
    done = publish(make_run(), REPO)
    assert moved and hub.commits(REPO)[0].oid == moved[0]
    assert hub.tags(REPO) == {"v1": done.commit} and done.commit != moved[0]
    # What a person added is not ours to remove.
    hub.before = None
    publish(make_run("two", seed=1), REPO)
    assert hub.files(REPO, "v2")["NOTES.md"] == b"a person's"


def test_main_moves_before_our_commit(hub, make_run):
    run, moved = make_run(), []
    publish(run, REPO)

    def move(method, path):
        if "/commit/" in path and len(moved) < 3:
            moved.append(hub.add(REPO, {"NOTES.md": str(len(moved)).encode()}, message="notes"))

    hub.before = move
    done = publish(make_run("two", seed=1), REPO)
    assert len(moved) == 3 and hub.tags(REPO)["v2"] == done.commit
    assert hub.files(REPO, "v2")["NOTES.md"] == b"2"
    assert len(publishes(hub)) == 2


def test_versions_that_main_has_lost_are_known_by_their_tags(hub, make_run):
    """A person squashed the history."""
    one, two = make_run("one"), make_run("two", seed=1)
    publish(one, REPO)
    second = publish(two, REPO)
    repo = hub.repos["dataset", REPO]
    repo.commit("main", repo.branches.pop("main").blobs, "Squashed")
    assert len(hub.commits(REPO)) == 1
    again = publish(two, REPO)
    assert (again.tag, again.commit, again.new) == ("v2", second.commit, False)
    assert publish(one, REPO).tag == "v3"


def test_a_tag_that_is_on_its_way_is_no_news_on_the_next_card(hub, make_run):
    one, two = make_run("one"), make_run("two", seed=1)
    hub.fault = lambda method, path, number: 403 if "/tag/" in path else None
    with pytest.raises(SelfsynthError, match="the Hub refused"):
        publish(one, REPO)
    hub.fault = None
    assert publish(two, REPO).tag == "v2"
    assert publish(one, REPO).tag == "v1"
    assert "| `v1` |" in hub.files(REPO, "v2")["README.md"].decode()


def test_a_tag_or_branch_of_that_name_is_somebody_elses(hub, make_run):
    hub.add(REPO, {"README.md": b"# Mine"}, tags=["v3", "release"])
    HfApi(endpoint=hub.url, token="hf_me").create_branch(REPO, branch="v4", repo_type="dataset")
    assert publish(make_run(), REPO).tag == "v5"


def test_somebody_takes_our_name_in_between(hub, make_run):
    def take(method, path):
        if "/tag/" in path and "v1" not in hub.tags(REPO):
            hub.tag(REPO, "v1", hub.commits(REPO)[-1].oid)

    hub.before = take
    done = publish(make_run(), REPO)
    assert done.tag == "v2" and hub.tags(REPO)["v2"] == done.commit
    assert 'revision="v2"' in hub.files(REPO, "v2")["README.md"].decode()


# ---------------------------------------------------------------- people's edits


def test_what_a_person_wrote_on_the_card_stays(hub, make_run):
    publish(make_run("one"), REPO)
    card = hub.files(REPO)["README.md"].decode()
    card = card.replace("pretty_name: SAO preference pairs by tiny", "pretty_name: Small talk")
    card = card.replace("tags:\n- synthetic\n", "license: cc0-1.0\ntags:\n- mine\n", 1)
    card = card.replace("<!-- selfsynth:begin -->", "# Read me first\n\n<!-- selfsynth:begin -->")
    card = card.replace("## Limits", "## Limits as I see them") + "\n## Thanks\n\nTo all.\n"
    hub.add(REPO, {"README.md": card.encode()}, message="my words")
    publish(make_run("two", count=50, seed=1), REPO)
    card = hub.files(REPO, "v2")["README.md"].decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["pretty_name"] == "Small talk" and metadata["license"] == "cc0-1.0"
    assert "mine" in metadata["tags"] and "synthetic" not in metadata["tags"]
    assert "dpo" in metadata["tags"]
    infos = {info["config_name"]: info["splits"] for info in metadata["dataset_info"]}
    assert sum(split["num_examples"] for split in infos["ledger"]) == 50
    before, rest = card.split("<!-- selfsynth:begin -->")
    inside, after = rest.split("<!-- selfsynth:end -->")
    assert before.strip().endswith("# Read me first")
    assert after.strip() == "## Thanks\n\nTo all."
    assert "## Limits\n" in inside and "as I see them" not in card


def test_what_a_person_added_beside_our_files_stays(hub, make_run, tmp_path):
    publish(make_run("one"), REPO)
    config = "configs:\n- config_name: mine\n  data_files: data/mine.csv\n"
    card = hub.files(REPO)["README.md"].decode().replace("configs:\n", config, 1)
    card += "\n![Our logo](assets/logo.png)\n"
    theirs = {"data/mine.csv": b"a\n1\n", "assets/logo.png": b"x", "data/train-1.parquet": b"y"}
    hub.add(REPO, {"README.md": card.encode(), **theirs})
    publish(make_run("two", seed=1), REPO)
    files = hub.files(REPO, "v2")
    assert theirs.items() <= files.items()
    assert b"data_files: data/mine.csv" in files["README.md"]
    assert b"(assets/logo.png)" in files["README.md"]
    for name, data in files.items():
        (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / name).write_bytes(data)
    assert verify(tmp_path / "got")[0] == []


def test_words_that_older_yaml_takes_for_truth_values_stay_words(hub, make_run):
    publish(make_run("one"), REPO)
    card = hub.files(REPO)["README.md"].decode()
    card = card.replace("language:\n- en\n", "language: no\npretty_name2: on\nok: true\n")
    hub.add(REPO, {"README.md": card.encode()})
    publish(make_run("two", seed=1), REPO)
    metadata = yaml.safe_load(hub.files(REPO, "v2")["README.md"].decode().split("---\n")[1])
    assert (metadata["language"], metadata["pretty_name2"], metadata["ok"]) == ("no", "on", True)


def test_a_card_that_was_there_before_us(hub, make_run):
    hub.add(REPO, {"README.md": b"---\nlicense: mit\n---\n# About me\n\nHello.\n"})
    publish(make_run(), REPO)
    card = hub.files(REPO)["README.md"].decode()
    assert card.rstrip().endswith("# About me\n\nHello.") and "license: mit" in card
    assert card.count("## Versions") == 1


def test_metadata_that_cannot_be_read_is_not_thrown_away(hub, make_run):
    hub.add(REPO, {"README.md": b"---\na: [\n---\n# About me\n"})
    with pytest.raises(SelfsynthError, match="mend it on the Hub first"):
        publish(make_run(), REPO)
    assert hub.tags(REPO) == {}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("token", "repo", "error", "words"),
    [
        ("", REPO, SelfsynthError, "no token for the Hub"),
        ("hf_wrong", REPO, SelfsynthError, "does not know this token"),
        ("hf_reader", REPO, SelfsynthError, "may only read"),
        ("hf_me", "other/pairs", SelfsynthError, "me may not write to other"),
        ("hf_other", "me/pairs", SelfsynthError, "other may not write to me"),
        ("hf_me", "me/my pairs", UsageError, "--repo-id"),
        ("hf_me", "a/b/c", UsageError, "--repo-id"),
        ("hf_me", "me/pairs.git", UsageError, "--repo-id"),
        ("hf_me", "me/", UsageError, "--repo-id"),
    ],
)
def test_what_cannot_be_published_to(
    hub, make_run, monkeypatch, tmp_path, token, repo, error, words
):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for act in (lambda: check(repo), lambda: publish(make_run(), repo)):
        with pytest.raises(error, match=words) as caught:
            act()
        assert "\n" not in str(caught.value)
        assert caught.value.exit_status == (2 if error is UsageError else 1)
    assert not [path for method, path in hub.requests if method != "GET"]


def test_an_organisation_and_a_name_alone(hub, make_run):
    assert check("team/pairs") == "team/pairs"
    assert check("pairs") == "me/pairs"
    assert publish(make_run(), "pairs").repo_id == "me/pairs"


@pytest.mark.parametrize(
    ("scoped", "allowed"),
    [
        ([{"entity": {"type": "user", "name": "me"}, "permissions": ["repo.write"]}], True),
        ([{"entity": {"type": "user", "name": "me"}, "permissions": ["repo.content.read"]}], False),
        ([{"entity": {"type": "org", "name": "team"}, "permissions": ["repo.write"]}], False),
        ([{"entity": {"type": "dataset", "name": REPO}, "permissions": ["repo.write"]}], True),
        ([{"entity": {"type": "model", "name": REPO}, "permissions": ["repo.write"]}], False),
        ([{"entity": {"type": "dataset", "name": "me/x"}, "permissions": ["repo.write"]}], False),
        ([], False),
    ],
)
def test_fine_grained_tokens(hub, monkeypatch, scoped, allowed):
    hub.tokens["hf_fine"] = {
        **{"name": "me", "role": "fineGrained", "orgs": [{"name": "team", "roleInOrg": "write"}]},
        "scoped": scoped,
    }
    monkeypatch.setenv("HF_TOKEN", "hf_fine")
    if allowed:
        assert check(REPO) == REPO
    else:
        with pytest.raises(SelfsynthError, match=f"may not write to {REPO}"):
            check(REPO)


def test_a_repository_of_another_member(hub):
    """Whoever contributes to an organisation may make repositories there, and write to no other."""
    hub.tokens["hf_me"]["orgs"] = [{"name": "team", "roleInOrg": "contributor"}]
    hub.add("team/theirs", {"README.md": b"x"})
    assert check("team/new") == "team/new"
    with pytest.raises(SelfsynthError, match="dataset team/theirs: the Hub refused"):
        check("team/theirs")


def test_offline_nothing_is_tried_again(hub, make_run, monkeypatch):
    waited = []
    monkeypatch.setattr("hub_cards.publish.time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session()  # a session knows from its beginning whether it is offline
    with pytest.raises(SelfsynthError, match="offline mode is enabled"):
        publish(make_run(), REPO)
    assert waited == [] and hub.requests == []


def test_private_means_private(hub, make_run):
    publish(make_run(), "me/secret", private=True)
    assert HfApi(endpoint=hub.url, token="hf_me").dataset_info("me/secret").private
    publish(make_run(), REPO)
    with pytest.raises(SelfsynthError, match=f"dataset {REPO} is public"):
        publish(make_run("two", seed=1), REPO, private=True)
    assert list(hub.tags(REPO)) == ["v1"]


def test_metadata_that_the_hub_refuses(hub):
    with pytest.raises(SelfsynthError, match="the Hub refuses the card's metadata"):
        check(REPO, metadata={"language": [7]})


def test_a_folder_that_is_not_whole(hub, make_run, tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        publish(tmp_path / "nothing", REPO)
    with pytest.raises(UsageError, match="holds no finished dataset"):
        publish(tmp_path, REPO)
    run = make_run()
    (data,) = (run / "data").glob("train-*")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(SelfsynthError, match="is not what its name says"):
        publish(run, REPO)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda card: card.replace("tags:", "tags: [", 1), "its metadata cannot be read"),
        (lambda card: card.replace("<!-- selfsynth:begin -->", ""), "has lost the markers"),
        (lambda card: card.replace("<!-- selfsynth:end -->", ""), "has lost the markers"),
    ],
)
def test_a_card_that_no_later_version_could_replace(hub, make_run, change, words):
    run = make_run()
    (run / "README.md").write_text(change((run / "README.md").read_text()))
    with pytest.raises(SelfsynthError, match=words):
        publish(run, REPO)
    assert hub.requests == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"identity": {}, "counts": [1]}'])
def test_a_model_without_provenance(hub, tmp_path, text):
    for name in ("model.safetensors", "README.md"):
        (tmp_path / name).write_text("x")
    (tmp_path / "provenance.json").write_text(text)
    with pytest.raises(SelfsynthError, match=r"provenance\.json cannot be read"):
        publish(tmp_path, REPO, "model")
    assert hub.requests == []


# ---------------------------------------------------------------- privacy


def test_secrets_are_not_published(hub, make_run, monkeypatch):
    run = make_run()
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abcdefghijkl")
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    made = json.loads((run / "provenance.json").read_text())
    for text in ("sk-abcdefghijkl", f"--x {run}/data", "hf_" + "a" * 34):
        (run / "provenance.json").write_text(json.dumps({**made, "command": text}))
        with pytest.raises(SelfsynthError, match="stands in its card, provenance"):
            publish(run, REPO)
    assert hub.requests == []
    (run / "provenance.json").write_text(json.dumps(made))
    assert secrets_in((run / "README.md").read_text(), run) is None


def test_a_published_version_holds_together(hub, make_run, tmp_path):
    publish(make_run(), REPO)
    for name, data in hub.files(REPO).items():
        (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / name).write_bytes(data)
    assert verify(tmp_path / "got")[0] == []


# ---------------------------------------------------------------- models


def test_a_model_is_a_version_too(hub, tmp_path):
    commit = "c" * 40
    provenance = {
        "selfsynth": {"version": "0.1.0", "commit": None},
        "identity": {
            "method": "simpo",
            "base": f"ORG/base@{commit}",
            "dataset": f"me/pairs@{commit}",
            "dataset_revision": "v1",
            "learning_rate": 1e-6,
        },
        "seeds": {"seed": 0},
        "engines": {},
        "libraries": {"trl": "1.16.0"},
        "parents": [
            {"repo": "ORG/base", "commit": commit, "type": "model"},
            {"repo": "me/pairs", "commit": commit, "type": "dataset"},
        ],
        "judging": None,
        "facts": {
            **{"model_name": "tiny", "base_licence": "apache-2.0"},
            **{"languages": ["en"], "library": "transformers"},
        },
        "counts": {"asked": 10, "kept": 10, "dropped": {}},
        "tokens": {},
        "wall_seconds": 1.0,
        "command": "python recipes/simpo.py",
    }
    gsm8k = {"dataset_id": "openai/gsm8k", "task_id": "gsm8k"}
    results = [
        Result("AlpacaEval 2.0", "win rate", wilson(60, 100), judge="somebody"),
        Result("GSM8K", "accuracy", wilson(50, 100), **gsm8k),
    ]
    folder = tmp_path / "model"
    (folder / "checkpoint-1").mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "training_args.bin", "checkpoint-1/x.json"):
        (folder / name).write_bytes(b"{}")
    (folder / "provenance.json").write_text(json.dumps(provenance))
    write_model_card(folder, provenance, results)
    done = publish(folder, "me/tiny", "model")
    files = hub.files("me/tiny", "v1", repo_type="model")
    eval_results = ".eval_results/openai--gsm8k.yaml"
    kept = {"model.safetensors", "config.json", "provenance.json", "README.md", eval_results}
    assert set(files) == kept | {".gitattributes"}
    card = files["README.md"].decode()
    assert '"me/tiny", revision="v1"' in card and "<repo>" not in card and "## Versions" in card
    assert done.url == f"{hub.url}/me/tiny/tree/v1"
    assert hub.commits("me/tiny", "model")[0].title == "v1: 10 rows trained on"
    # Weights in other files, and no results: what is gone is removed.
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    write_model_card(folder, provenance)
    assert publish(folder, "me/tiny", "model").tag == "v2"
    files = hub.files("me/tiny", "v2", repo_type="model")
    assert "model.safetensors" not in files and eval_results not in files
    assert not publish(folder, "me/tiny", "model").new


# ---------------------------------------------------------------- hostile cards


def test_ten_megabytes_of_samples_and_titles_that_break_yaml(hub, tmp_path):
    pairs, ledger = make_rows(4)
    long = "🦔 --- : {[ \u202e " * 400_000
    for row in pairs:
        row["persona"] = long
    facts = {"model_name": 'a: "b" --- {🦔}\n- c', "judge_name": "# x"}
    write(tmp_path / "run", pairs, ledger, facts=facts)
    publish(tmp_path / "run", REPO)
    card = hub.files(REPO, "v1")["README.md"]
    assert len(card) < 100_000
    assert "🦔" in yaml.safe_load(card.decode().split("\n---\n")[0][4:])["pretty_name"]
