"""The audit, controls, own prompts, odd models: as commands, over real connections."""

import json
import re
from collections import Counter

import pytest

from selfsynth.schema import check_dataset
from tests.conftest import run_script
from tests.pipelines.test_sao import (
    arguments,
    data_names,
    in_process,
    ledger_of,
    pairs_of,
)
from tests.servers.batch_server import BatchServer
from tests.servers.model_server import ModelServer, judge_longer

N = 16


def sound(folder, n=N):
    """The pairs and the ledger of a run, which agree."""
    pairs, ledger = pairs_of(folder), ledger_of(folder)
    assert check_dataset(pairs, ledger) == [] and len(ledger) == n
    return pairs, ledger


def kinds(server):
    return Counter(one.kind for one in server.requests)


def provenance(folder):
    return json.loads((folder / "provenance.json").read_text())


def front(folder):
    """The card up to its first section."""
    return (folder / "README.md").read_text().split("## Load it")[0]


# The audit


def judge_shorter(question):
    """A judge that is wrong whenever the spoilt response is the shorter one."""
    verdicts = judge_longer(question)
    return dict(zip(verdicts, reversed(verdicts.values()), strict=True))


def judge_sound(question):
    """A judge that tells what is spoilt, pointwise; in pairs it names the first."""
    if question.mode == "pairwise":
        return {"1": 0.9, "2": 0.1}
    text = question.responses[0]
    whole = re.fullmatch(r"[A-Z][^A-Z]*\.", text) is not None and len(text.split()) > 8
    good = 0.2 + 0.5 * whole + 0.2 * judge_longer(question._replace(mode="yesno"))["Yes"]
    if question.mode == "yesno":
        return {"Yes": good, "No": 1 - good}
    return {"1": 1 - good, "5": good}


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """A run that audited its judge, and what its server saw."""
    folder = tmp_path_factory.mktemp("audited") / "run"
    with ModelServer(judge=judge_sound) as server:
        process = run_script(*arguments(server.url, folder, "--judge-mode", "auto", n=N))
        return folder, server, process


def test_the_mode_is_chosen_on_evidence(audited):
    folder, _, process = audited
    pairs, _ = sound(folder)
    audit = provenance(folder)["judging"]["audit"]
    assert audit["mode"] == provenance(folder)["judging"]["mode"] != "pairwise"
    assert {pair["judge_mode"] for pair in pairs} == {audit["mode"]}
    assert provenance(folder)["identity"]["judge_mode"] == "auto"
    # Off-topic answers look whole to this judge; the other three kinds it tells.
    tried = audit["modes"]["rating"]
    assert tried["kinds"]["cut"] == [10, 10] and tried["kinds"]["refusal"] == [10, 10]
    assert audit["modes"]["pairwise"]["first"] == [80, 80]
    assert audit["verdict"] == "believed" and audit["verdict"] in process.stderr
    card = (folder / "README.md").read_text()
    assert "### Was it to be believed?" in card and "**`rating`**" in card


def test_the_audit_costs_no_more_than_it_may(audited):
    folder, server, _ = audited
    probe, own_verdicts = 1, 2 * N
    assert kinds(server)["judge"] - probe - own_verdicts <= 200
    # What it asks of the model is the run's own, and paid for once.
    assert kinds(server)["prompt"] == N and kinds(server)["response"] == 2 * N
    assert server.counts()["repeats"] <= 20  # the verdicts asked again for the noise floor
    assert provenance(folder)["tokens"]["audit"]["requests"] <= 200


def test_a_named_mode_is_not_audited_unless_asked(python, tmp_path):
    with ModelServer(judge=judge_sound) as server:
        python(*arguments(server.url, tmp_path / "a", "--judge-mode", "rating", n=4))
        assert provenance(tmp_path / "a")["judging"]["audit"] is None
        assert kinds(server)["judge"] == 9
        python(*arguments(server.url, tmp_path / "b", "--judge-mode", "rating", "--audit", n=4))
        assert provenance(tmp_path / "b")["judging"]["audit"]["contrasts"] == 16
    assert data_names(tmp_path / "a") == data_names(tmp_path / "b")


def test_a_judge_no_better_than_chance_stops_the_run(python, tmp_path):
    with ModelServer(judge="always_first") as server:
        command = arguments(server.url, tmp_path / "run", "--judge-mode", "auto", n=N)
        command += ["--audit-modes", "pairwise"]
        failed = python(*command, status=1)
        assert "error: the judge is no better than chance" in failed.stderr
        assert not (tmp_path / "run/README.md").exists()
        asked = len(server.requests)
        stopped = python(*command, "--accept-weak-judge", status=1)
        assert "nothing was kept" in stopped.stderr  # all ties; but it went on
        assert len(server.requests) > asked


def test_a_weak_judge_that_was_accepted_is_on_the_card_first(python, tmp_path):
    with ModelServer(judge=judge_shorter) as server:
        command = arguments(server.url, tmp_path / "run", "--judge-mode", "auto", n=6)
        python(*command, "--audit-modes", "yesno", "--audit-prompts", 6, status=1)
        python(*command, "--audit-modes", "yesno", "--audit-prompts", 6, "--accept-weak-judge")
    first = next(line for line in front(tmp_path / "run").split("\n") if line.startswith("> - "))
    assert "no better than chance" in first and "was accepted" in first


def test_few_contrasts_keep_the_usual_mode(python, tmp_path):
    def judge(question):
        return (judge_longer if question.mode == "pairwise" else judge_sound)(question)

    with ModelServer(judge=judge) as server:
        run = python(*arguments(server.url, tmp_path / "run", "--judge-mode", "auto", n=4))
    assert "too few to tell" in run.stderr
    assert provenance(tmp_path / "run")["judging"]["mode"] == "pairwise"
    assert "too few to tell" in front(tmp_path / "run")


def test_audit_alone(python, tmp_path):
    with ModelServer(judge=judge_sound) as server:
        command = ["pipelines/sao.py", "audit", "--model", "scripted", "--base-url", server.url]
        command += ["--output-dir", tmp_path / "run"]
        found = python(*command)
        told = json.loads(found.stdout)
        assert told["verdict"] == "believed" and told["mode"] == told["best"] != "pairwise"
        assert "off-topic" in found.stderr and not (tmp_path / "run/README.md").exists()
        asked = len(server.requests)
        again = python(*command)
        assert json.loads(again.stdout) == told and len(server.requests) == asked + 0
        few = [*command, "--audit-prompts", 2, "--audit-modes", "rating"]
        assert "audit.prompts: 12 there, 2 here" in python(*few, status=2).stderr
        few[few.index(tmp_path / "run")] = tmp_path / "few"
        assert json.loads(python(*few, status=4).stdout)["verdict"] == "too few to tell"
    with ModelServer(judge="tie") as server:
        command[command.index("--base-url") + 1] = server.url
        weak = python(*command[:-1], tmp_path / "weak", status=3)
        assert json.loads(weak.stdout)["verdict"] == "no better than chance"


def test_an_audit_goes_on_where_it_was_stopped(python, tmp_path):
    with ModelServer(judge=judge_sound) as server:
        command = arguments(server.url, tmp_path / "run", "--judge-mode", "auto", n=N)
        stopped = python(*command, "--max-requests", 90, status=1)
        assert "--max-requests 90 is used up" in stopped.stderr
        python(*command)
        assert server.counts()["repeats"] <= 20  # the verdicts asked again, and nothing else
    sound(tmp_path / "run")


def test_a_margin_below_the_noise_floor_is_warned_about(python, tmp_path):
    drift = iter(range(10**6))

    def judge(question):
        length = len("".join(question.responses))
        good = 0.5 + 0.4 * (length % 50) / 50 + 1e-4 * (next(drift) % 7)
        return {"1": 1 - good, "5": good}

    with ModelServer(judge=judge) as server:
        run = python(*arguments(server.url, tmp_path / "run", "--judge-mode", "rating", "--audit",
                                "--accept-weak-judge", "--audit-modes", "rating", n=4))  # fmt: skip
    assert re.search(
        r"warning: the same verdict moved by up to [\d.e-]+ .*--min-margin 0", run.stderr
    )


# Controls


@pytest.mark.parametrize("labels", ["random", "longer"])
def test_controls_take_the_stored_answers(audited, python, tmp_path, labels):
    folder, _, _ = audited
    with ModelServer() as server:
        python(*arguments(server.url, tmp_path / "run", "--labels", labels, "--reuse", folder, n=N))
        assert len(server.requests) == 1  # is this the same model?
    pairs, ledger = sound(tmp_path / "run")
    assert [row["responses"] for row in ledger] == [row["responses"] for row in ledger_of(folder)]
    for pair in pairs:
        assert (pair["judge_mode"], pair["judge"], pair["judge_margin"]) == (labels, None, None)
        if labels == "longer":
            assert len(pair["chosen"][0]["content"]) > len(pair["rejected"][0]["content"])
    if labels == "random":
        first = [row["responses"][0] for row in ledger]
        chosen = {pair["chosen"][0]["content"] for pair in pairs}
        assert 2 <= sum(text in chosen for text in first) <= N - 2
    assert "a control" in front(tmp_path / "run")


def test_another_judge_on_the_same_pairs(audited, python, tmp_path):
    folder, _, _ = audited
    with ModelServer(models=["other"], judge="longer") as judge, ModelServer() as model:
        python(*arguments(model.url, tmp_path / "run", "--judge", "other", "--judge-base-url",
                          judge.url, "--judge-mode", "yesno", "--reuse", folder, n=N))  # fmt: skip
        assert len(model.requests) == 1 and kinds(judge) == {"judge": 2 * N + 1}
    pairs, _ = sound(tmp_path / "run")
    assert {pair["judge"] for pair in pairs} == {"other"}
    assert {pair["id"] for pair in pairs} <= {row["pair_id"] for row in ledger_of(tmp_path / "run")}


def test_without_personas_the_repeats_are_counted(python, tmp_path):
    def script(body):
        if "somebody might send" in body["messages"][-1]["content"] and body["seed"] % 2:
            return {
                "model": "scripted",
                "choices": [
                    {
                        "message": {"content": "User prompt: Tell me a very short story."},
                        "finish_reason": "stop",
                    }
                ],
            }
        return None  # fmt: skip

    with ModelServer(script=script) as server:
        python(*arguments(server.url, tmp_path / "run", "--no-personas", n=N))
        asked = {one.body["messages"][-1]["content"] for one in server.requests
                 if one.kind == "prompt"}  # fmt: skip
        assert len(asked) == 1 and "Here is a person" not in asked.pop()
    _, ledger = sound(tmp_path / "run")
    repeated = sum(row["reason"] == "prompt_repeated" for row in ledger)
    assert repeated >= 2 and {row["persona"] for row in ledger} == {None}
    assert f"| repeated: the same words as an earlier prompt | {100 * repeated / N:.1f} %" in (
        tmp_path / "run/README.md").read_text()  # fmt: skip


# More responses, own prompts and criteria


@pytest.mark.parametrize("mode", ["rating", "pairwise"])
def test_the_best_meets_the_worst(python, tmp_path, mode):
    with ModelServer(judge="longer") as server:
        python(*arguments(server.url, tmp_path / "run", "--num-responses", 4,
                          "--judge-mode", mode, n=5))  # fmt: skip
        each = 4 if mode == "rating" else 12
        assert kinds(server) == {"prompt": 5, "response": 20, "judge": 5 * each + 1}
    pairs, ledger = sound(tmp_path / "run", 5)
    by_id = {row["pair_id"]: row for row in ledger}
    assert len(pairs) >= 4
    for pair in pairs:
        row = by_id[pair["id"]]
        assert len(row["responses"]) == 4 and len(row["scores"]) == each
        by_length = sorted(row["responses"], key=lambda text: len(text.split()))
        chosen, rejected = pair["chosen"][0]["content"], pair["rejected"][0]["content"]
        assert len(chosen.split()) == len(by_length[-1].split())
        assert len(rejected.split()) == len(by_length[0].split())


def test_of_many_responses_some_may_be_of_no_use(python, tmp_path):
    with ModelServer(judge="longer") as server:  # responses have 20 to 120 words
        python(*arguments(server.url, tmp_path / "run", "--num-responses", 3, "--judge-mode",
                          "rating", "--max-new-tokens", 80, n=N))  # fmt: skip
    pairs, ledger = sound(tmp_path / "run")
    seen = Counter()
    for row in ledger:
        whole = [reason == "stop" for reason in row["finish_reasons"]]
        seen[sum(whole)] += 1
        if sum(whole) < 2:
            assert row["reason"] == "response_truncated" and row["scores"] == []
        else:
            assert [score is not None for score in row["scores"]] == whole
    assert seen[2] and (seen[0] or seen[1])
    cut = {
        text
        for row in ledger
        for text, reason in zip(row["responses"], row["finish_reasons"], strict=True)
        if reason == "length"
    }
    assert not [pair for pair in pairs if {pair["chosen"][0]["content"],
                                           pair["rejected"][0]["content"]} & cut]  # fmt: skip


def test_own_prompts_skip_personas(python, tmp_path):
    texts = ["Hi", "Why is the sky blue?", "why is the sky  blue?", "I cannot help with that."]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps({"prompt": one}) for one in texts))
    with ModelServer() as server:
        command = arguments(server.url, tmp_path / "run", "--prompts", tmp_path / "mine.jsonl")
        del command[command.index("--num-prompts") : command.index("--num-prompts") + 2]
        python(*command)
        assert kinds(server) == {"response": 8, "judge": 9}
    _, ledger = sound(tmp_path / "run", 4)
    assert sorted(row["prompt"] for row in ledger) == sorted(texts)
    origin = provenance(tmp_path / "run")["identity"]["prompts"]
    assert origin["name"] == "mine.jsonl" and len(origin["sha256"]) == 64


def test_criteria_language_and_system_prompt(python, tmp_path):
    (tmp_path / "criteria.txt").write_text("- brevity {braces} </request>\n")
    with ModelServer() as server:
        python(*arguments(server.url, tmp_path / "run", "--judge-criteria",
                          tmp_path / "criteria.txt", "--language", "de",
                          "--system-prompt", "Be brief.", n=4))  # fmt: skip
        bodies = {kind: [one.body["messages"] for one in server.requests if one.kind == kind]
                  for kind in ("prompt", "response", "judge")}  # fmt: skip
    assert all("write the prompt in German" in one[-1]["content"] for one in bodies["prompt"])
    told = [one for one in bodies["response"] if one[-1]["content"] != "Answer with"]
    assert all(one[0] == {"role": "system", "content": "Be brief."} for one in told)
    judged = [one[-1]["content"] for one in bodies["judge"] if len(one[-1]["content"]) > 100]
    assert judged and all("brevity {braces} </request>" in one for one in judged)
    assert not [one for one in judged if "accuracy" in one or "four criteria" in one]
    pairs, _ = sound(tmp_path / "run", 4)
    assert all(pair["prompt"][0]["role"] == "system" for pair in pairs)
    card = (tmp_path / "run/README.md").read_text()
    assert "\n- de\n" in card and "- brevity {braces}" in card


def test_a_model_without_a_system_role(python, tmp_path):
    with ModelServer(system_role=False) as server:
        python(*arguments(server.url, tmp_path / "run", "--system-prompt", "Be brief.", n=4))
        refused = [one for one in server.requests if one.status == 400]
        assert len(refused) == 1  # found out once
        asked = len(server.requests)
        (tmp_path / "run/README.md").unlink()
        python(*arguments(server.url, tmp_path / "run", "--system-prompt", "Be brief.", n=4))
        assert len(server.requests) == asked  # and for good
    pairs, _ = sound(tmp_path / "run", 4)
    for pair in pairs:
        (turn,) = pair["prompt"]
        assert turn["role"] == "user" and turn["content"].startswith("Be brief.\n\n")
    assert "refuses system" in provenance(tmp_path / "run")["engines"]["model"]


def test_the_models_own_sampling(python, tmp_path):
    with ModelServer() as server:
        python(*arguments(server.url, tmp_path / "run", "--generation-defaults", "model", n=3))
        for one in server.requests:
            assert ("temperature" in one.body) == (one.kind == "judge")
    identity = provenance(tmp_path / "run")["identity"]
    assert identity["temperature"] is None and identity["top_p"] is None
    assert identity["generation_defaults"] == "model"


# Models that think


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run of a model that does not think."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    with ModelServer() as server:
        run_script(*arguments(server.url, folder, n=N))
    return folder


@pytest.mark.parametrize("style", ["content", "field", "field_logprobs"])
def test_thoughts_change_neither_answers_nor_verdicts(plain, python, tmp_path, style):
    with ModelServer(reasoning=style) as server:
        python(*arguments(server.url, tmp_path / "off", n=N))
        assert data_names(tmp_path / "off") == data_names(plain)  # it took the switch
        python(*arguments(server.url, tmp_path / "on", "--thinking", "--judge-thinking", n=N))
    for with_thoughts, without in zip(ledger_of(tmp_path / "on"), ledger_of(plain), strict=True):
        for column in ("prompt", "responses", "scores", "verdicts", "reason"):
            assert with_thoughts[column] == without[column]
    assert "<think>" not in json.dumps(ledger_of(tmp_path / "on"))


def test_a_model_that_cannot_but_think(tmp_path, capsys, python):
    with ModelServer(reasoning="content", refuse=["chat_template_kwargs"]) as server:
        assert in_process(*arguments(server.url, tmp_path / "run", n=3)[1:]) == 1
        assert "thinks before it answers" in capsys.readouterr().err
        assert len(server.requests) == 2  # before anything was spent
        python(*arguments(server.url, tmp_path / "run", "--thinking", "--judge-thinking", n=3))
    sound(tmp_path / "run", 3)


# Before and during


def test_a_judge_request_that_would_not_fit_is_not_sent(python, tmp_path):
    with ModelServer(context_length=300) as server:
        python(*arguments(server.url, tmp_path / "run", "--max-new-tokens", 150,
                          "--judge-mode", "pairwise", n=N))  # fmt: skip
        assert not [one for one in server.requests if one.status == 400 and one.kind == "judge"]
    _, ledger = sound(tmp_path / "run")
    reasons = Counter(row["reason"] for row in ledger)
    assert reasons["context_exceeded"] and reasons[None]


def test_a_preview_keeps_nothing(python, tmp_path):
    with ModelServer(judge="longer") as server:
        command = arguments(server.url, tmp_path / "run", "--preview", 3, n=N)
        shown = python(*command).stderr
    assert shown.count("— row") == 3 and "(chosen)" in shown and "persona: " in shown
    assert not (tmp_path / "run").exists()


BAD = {
    "--labels": (["--labels", "best"], "--labels must be one of"),
    "control with judge": (["--labels", "random", "--judge", "x"], "--judge means nothing"),
    "control with mode": (["--labels", "longer", "--judge-mode", "rating"], "--judge-mode means"),
    "margin without mode": (["--min-margin", "0.5"], "name a --judge-mode too"),
    "both": (["--personas", "a.txt", "--no-personas"], "exclude each other"),
    "prompts": (["--prompts", "a.txt", "--no-personas"], "--prompts needs no personas"),
    "no prompts": (["--prompts", "no-such-file.txt"], "cannot be read"),
    "criteria": (["--judge-criteria", "no-such-file.txt"], "--judge-criteria"),
    "language": (["--language", "klingon"], "ISO 639-1"),
    "defaults": (["--generation-defaults", "ours"], "must be paper or model"),
    "modes": (["--audit-modes", "rating,fancy"], "'fancy' is none of"),
    "modes of no audit": (["--judge-mode", "rating", "--audit-modes", "yesno"], "need --audit, or"),
    "control with audit": (["--labels", "random", "--audit-prompts", "3"], "--audit-prompts means"),
    "preview of a batch": (["--preview", "2", "--batch"], "leave out --batch"),
    "one response": (["--num-responses", "1"], "--num-responses"),
    "empty": (["--prompts", ""], "--prompts is empty"),
    "blank": (["--system-prompt", " \n"], "--system-prompt is empty"),
    "not UTF-8": (["--system-prompt", "a\udcff"], "--system-prompt is not UTF-8"),
    "preview of an audit": (["--preview", "2", "--audit"], "leave out --batch, --audit"),
    "preview": (["--preview", "0"], "--preview"),
    "timeout": (["--timeout", "0"], "--timeout"),
    "before": (["audit"], "stands before audit: flags come after"),
    "no command": (["frobnicate"], "frobnicate"),
}


@pytest.mark.parametrize(("flags", "said"), BAD.values(), ids=BAD)
def test_bad_usage(tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    start = ["--model", "scripted", "--base-url", "http://127.0.0.1:9/v1"]
    assert in_process(*start, *flags) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and said in message
    assert list(tmp_path.iterdir()) == []


# Growing


def test_merge(audited, plain, python, tmp_path):
    one, _, _ = audited
    with ModelServer(models=["other"], salt="other") as server:
        command = arguments(server.url, tmp_path / "two", n=8)
        command[command.index("scripted")] = "other"
        python(*command)
    merged = tmp_path / "merged"
    merge = ["pipelines/sao.py", "merge", one, tmp_path / "two", plain, "--output-dir", merged]
    said = python(*merge).stderr
    pairs, ledger = sound(merged, N + 8 + N)
    kept = {pair["id"] for pair in pairs_of(one)} | {
        pair["id"] for pair in pairs_of(tmp_path / "two")
    }
    # The third run has the prompts of the first; only what the first dropped is new in it.
    assert kept <= {pair["id"] for pair in pairs}
    prompts = [pair["prompt"][-1]["content"] for pair in pairs]
    assert len(set(prompts)) == len(prompts)
    repeated = sum(row["reason"] == "prompt_repeated" for row in ledger)
    assert repeated >= len(pairs_of(one)) - N + len(pairs_of(plain)) and "prompt_repeated" in said
    parents = provenance(merged)["parents"]
    assert [parent["run"] for parent in parents] == ["run", "two", "run-2"]
    assert len({parent["provenance_sha256"] for parent in parents}) == 3
    card = (merged / "README.md").read_text()
    assert "| `run-2.judge_mode` | `pairwise` |" in card and "| `run model` |" in card
    assert "from 3 runs of SAO" in card and "`other`" in card and "different modes" in card
    assert "finished already" in python(*merge).stderr
    two = ["pipelines/sao.py", "merge", one, one, "--output-dir", tmp_path / "x"]
    assert "named twice" in python(*two, status=2).stderr
    assert "at least two" in python(*two[:3], *two[4:], status=2).stderr
    (tmp_path / "no-run").mkdir()
    foreign = [*two[:3], tmp_path / "no-run", *two[4:]]
    assert "not the folder of a run" in python(*foreign, status=2).stderr
    inside = ["pipelines/sao.py", "merge", one, plain, "--output-dir", one / "x"]
    assert "outside the runs" in python(*inside, status=2).stderr
    assert not (tmp_path / "x").exists()


# Batches


def test_batches_make_the_same_dataset(plain, python, tmp_path):
    with BatchServer(seconds=0.1) as server:
        python(*arguments(server.url, tmp_path / "run", "--batch", n=N), timeout=180)
        assert [one.kind for one in server.requests].count("judge") >= 1
    assert data_names(tmp_path / "run") == data_names(plain)
    assert not list((tmp_path / "run/requests").glob("batch-*"))


def test_batches_need_a_server_that_has_them(tmp_path, python):
    with ModelServer() as server:
        failed = python(*arguments(server.url, tmp_path / "run", "--batch", n=3), status=1)
    assert "has no batch endpoint" in failed.stderr
    failed = python("pipelines/sao.py", "--batch", "--output-dir", tmp_path / "x", status=2)
    assert "--batch is for servers" in failed.stderr
