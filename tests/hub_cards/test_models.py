"""Model cards: every number is the one given, the Hub's own code reads it, no text breaks it."""

import math
import re

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from huggingface_hub.repocard_data import model_index_to_eval_results
from hypothesis import Phase, example, given, settings

from hub_cards import Result, write_model_card
from hub_cards.cards import BEGIN, END
from selfsynth.stats import Estimate
from tests.hub_cards.test_cards import front_matter, kinds, numbers, table, texts

BASE, COMMIT, OTHER = "Qwen/Qwen2.5-0.5B-Instruct", "a" * 40, "b" * 40
RUN = {"run": "sao-run", "provenance_sha256": "c" * 64}
PARTS = ("load", "/load", "versions", "/versions")

WIN_RATE = Result(
    "AlpacaEval 2.0", "win rate", Estimate(12.5, 10.25, 15.123456, 805), judge="gpt-4.1"
)
CONTROLLED = Result(
    "AlpacaEval 2.0",
    "length-controlled win rate",
    Estimate(11.75, 9.5, 14, 805),
    judge="gpt-4.1",
    date="2026-12-01",
    notes="greedy",
)
GSM8K = Result(
    "GSM8K",
    "exact match",
    Estimate(35.2, 32.6, 37.8, 1319),
    dataset_id="openai/gsm8k",
    task_id="gsm8k",
    dataset_revision="e" * 40,
    date="2026-12-01T10:30:00Z",
    notes="8 shots",
)
DIAMOND, MAIN = (
    Result(
        f"GPQA {task}",
        "accuracy",
        Estimate(value, value - 0.05, value + 0.05, 198),
        unit="",
        dataset_id="Idavidrein/gpqa",
        task_id=f"gpqa_{task}",
    )
    for task, value in (("diamond", 0.25), ("main", 0.5))
)


def provenance_of(identity=None, facts=None, **more):
    return {
        "selfsynth": {"version": "0.1.0", "commit": None},
        "identity": {
            "method": "simpo",
            "base": f"{BASE}@{COMMIT}",
            "dataset": f"me/pairs@{OTHER}",
            "dataset_revision": "v1",
            "learning_rate": 8e-07,
            "beta": 10.0,
            "lora": {"r": 16, "targets": ["q_proj", "v_proj"]},
        }
        | (identity or {}),
        "seeds": {"seed": 7},
        "engines": {},
        "libraries": {"trl": "1.16.0"},
        "parents": [
            {"repo": BASE, "commit": COMMIT, "type": "model"},
            {"repo": "me/pairs", "commit": OTHER, "type": "dataset"},
        ],
        "judging": None,
        "counts": {"asked": 1200, "kept": 1150, "dropped": {"too_long": 40, "empty": 10}},
        "tokens": {},
        "wall_seconds": 3723.4,
        "command": "python recipes/simpo.py --config recipe.yaml",
        "facts": {
            "model_name": "tiny-simpo",
            "base_licence": "apache-2.0",
            "languages": ["en"],
            "library": "transformers",
        }
        | (facts or {}),
    } | more


def write(folder, results=(), **about) -> str:
    write_model_card(folder, provenance_of(**about), results)
    return (folder / "README.md").read_text(encoding="utf-8")


def entries_of(folder, name):
    path = folder / ".eval_results" / f"{name}.yaml"
    return parse_eval_result_entries(yaml.safe_load(path.read_text(encoding="utf-8")))


def snippets(card):
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


@pytest.mark.parametrize(
    ("library", "relation"), [("transformers", "finetune"), ("peft", "adapter")]
)
def test_front_matter(library, relation, tmp_path):
    card = write(tmp_path, [WIN_RATE, GSM8K], facts={"library": library})
    data = front_matter(card)
    index = data.pop("model-index")
    assert data == {
        "base_model": BASE,
        "base_model_relation": relation,
        "datasets": ["me/pairs"],
        "language": ["en"],
        "library_name": library,
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["selfsynth", "trl", "simpo", "alignment"],
    }
    loaded = ModelCard.load(tmp_path / "README.md").data
    assert loaded.eval_results == model_index_to_eval_results(index)[1]
    assert loaded.to_dict() == front_matter(card)


@pytest.mark.parametrize(
    ("method", "task", "tags"),
    [
        ("simpo", "text-generation", ["simpo", "alignment"]),
        ("dpo", "text-generation", ["dpo", "alignment"]),
        ("reward", "text-classification", ["reward-model"]),
        ("sft", "text-generation", ["sft"]),
    ],
)
def test_methods(method, task, tags, tmp_path):
    data = front_matter(write(tmp_path, [WIN_RATE], identity={"method": method}))
    assert (data["pipeline_tag"], data["tags"][2:]) == (task, tags)
    assert data["model-index"][0]["results"][0]["task"] == {"type": task}


@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_what_is_on_the_hub_is_linked_and_what_is_not_is_named(library, tmp_path):
    hub = "https://huggingface.co"
    card = write(tmp_path, facts={"library": library})
    assert f"[`{BASE}`]({hub}/{BASE}/tree/{COMMIT})" in card
    assert f"[`me/pairs`]({hub}/datasets/me/pairs/tree/{OTHER})" in card
    assert "revision `v1`" in card

    digest = "sha256:" + "d" * 64
    card = write(
        tmp_path,
        identity={"base": digest, "dataset": RUN, "dataset_revision": None},
        facts={"library": library, "base_licence": None, "languages": []},
        parents=[RUN | {"type": "dataset"}],
    )
    data = front_matter(card)
    names = ("base_model", "base_model_relation", "datasets", "license", "language")
    assert not data.keys() & set(names)
    assert f"- Base model: `{digest}`\n" in card
    assert f"- Dataset: the local run `sao-run`, SHA-256 of its provenance `{'c' * 64}`\n" in card
    assert table(card, "made from")["sao-run"] == ["dataset", "c" * 64]
    assert f"{hub}/" not in card
    assert "No licence is claimed" in card


@pytest.mark.parametrize(
    ("licence", "said"),
    [
        ("llama3.2", {"license": "llama3.2"}),
        ("Qwen Research", {"license": "other", "license_name": "qwen-research"}),
        ("许可", {"license": "other"}),
        (None, {}),
    ],
)
def test_licence(licence, said, tmp_path):
    card = write(tmp_path, facts={"base_licence": licence})
    data = front_matter(card)
    assert {key: value for key, value in data.items() if key.startswith("license")} == said
    assert ("No licence is claimed" in card) == (licence is None)


def test_results_stand_where_the_hub_looks_for_them(tmp_path):
    given_results = [WIN_RATE, GSM8K, CONTROLLED, DIAMOND, MAIN]
    card = write(tmp_path, given_results)

    name, indexed = model_index_to_eval_results(front_matter(card)["model-index"])
    assert name == "tiny-simpo"
    for result, one in zip((WIN_RATE, CONTROLLED), indexed, strict=True):
        assert (one.dataset_name, one.metric_type) == (result.benchmark, result.metric)
        assert one.metric_name == f"{result.metric}, judged by gpt-4.1"
        told = [one.metric_value, *(one.metric_args[key] for key in ("low", "high", "n"))]
        assert told == list(result.estimate)
        assert one.metric_args["judge"] == "gpt-4.1"
    assert indexed[1].metric_args["date"] == "2026-12-01"

    files = {path.name for path in (tmp_path / ".eval_results").iterdir()}
    assert files == {"openai--gsm8k.yaml", "Idavidrein--gpqa.yaml"}
    (entry,) = entries_of(tmp_path, "openai--gsm8k")
    for key in ("dataset_id", "task_id", "dataset_revision", "date"):
        assert getattr(entry, key) == getattr(GSM8K, key)
    assert entry.value == 35.2
    assert entry.notes == "exact match; 95 % interval 32.6 to 37.8 %; n = 1319; 8 shots"
    assert [(one.task_id, one.value) for one in entries_of(tmp_path, "Idavidrein--gpqa")] == [
        ("gpqa_diamond", 0.25),
        ("gpqa_main", 0.5),
    ]

    lines = [line for line in card.split("\n") if line.startswith(("| `Alpaca", "| `G"))]
    for result, line in zip(given_results, lines, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] == [f"`{result.benchmark}`", f"`{result.metric}`"]
        assert numbers(cells[2:5]) == [round(one, 4) for one in result.estimate]
        assert ("%" in cells[2]) == (result.unit == "%")
        assert cells[5:] == [
            f"`{result.judge}`" if result.judge else "none",
            f"`{result.notes}`" if result.notes else "",
        ]


def test_results_from_earlier_go(tmp_path):
    write(tmp_path, [GSM8K])
    card = write(tmp_path)
    assert list((tmp_path / ".eval_results").iterdir()) == []
    assert "model-index" not in front_matter(card)
    assert "None yet" in card


@pytest.mark.parametrize(
    "wrong",
    [
        {"estimate": Estimate(math.nan, 0, 1, 5)},
        {"estimate": Estimate(1, 2, 0, 5)},
        {"dataset_id": "openai/gsm8k"},
        {"task_id": "gsm8k"},
        {"dataset_revision": "e" * 40},
        {"dataset_id": "../../x", "task_id": "x"},
        {"date": "yesterday"},
    ],
)
def test_no_result(wrong):
    with pytest.raises(ValueError):
        Result(**{"benchmark": "b", "metric": "m", "estimate": Estimate(1, 0, 2, 5)} | wrong)


def test_two_results_for_one_place_are_refused(tmp_path):
    with pytest.raises(ValueError, match="several results"):
        write(tmp_path, [GSM8K, GSM8K])
    assert list(tmp_path.iterdir()) == []


def test_rows_in_and_out(tmp_path):
    card = write(tmp_path)
    rows = {name: numbers(cells) for name, cells in table(card, "outcome").items()}
    assert rows == {
        "trained on": [1150],
        "dropped: `too_long": [40],
        "dropped: `empty": [10],
        "all": [1200],
    }
    assert "1,200 rows read = 1,150 trained on + 50 dropped." in card
    assert "Data in and out" not in write(tmp_path, counts={})
    with pytest.raises(ValueError, match="1200"):
        write(tmp_path, counts={"asked": 1200, "kept": 3, "dropped": {}})


def test_settings_software_and_command(tmp_path):
    card = write(tmp_path, engines={"model": "vLLM 1"}, selfsynth={"version": "1", "commit": "ab"})
    settings_told = table(card, "setting")
    assert settings_told["learning_rate"] == ["8e-07"]
    assert settings_told["lora.r"] == ["16"]
    assert settings_told["lora.targets"] == ['["q_proj", "v_proj"]']
    assert settings_told["seeds: `seed"] == ["7"]
    software = {"selfsynth": ["1`, commit `ab"], "engine: `model": ["vLLM 1"], "trl": ["1.16.0"]}
    assert table(card, "software") == software
    assert table(card, "made from")["me/pairs"] == ["dataset", OTHER]
    assert "```bash\npython recipes/simpo.py --config recipe.yaml\n```" in card
    assert "Wall time: 1:02:03 (3,723.4 s)." in card
    used = {"requests": 5, "prompt_tokens": 1000, "completion_tokens": 20}
    assert table(write(tmp_path, tokens={"judge": used}), "role") == {"judge": ["5", "1,000", "20"]}


def test_pictures_are_shown_when_they_are_there(tmp_path):
    assert "assets/" not in write(tmp_path)
    (tmp_path / "assets").mkdir()
    for name in ("loss.png", "unknown.png"):
        (tmp_path / "assets" / name).touch()
    assert re.findall(r"\]\((assets/.*?)\)", write(tmp_path)) == ["assets/loss.png"]


@pytest.mark.parametrize("library", ["transformers", "peft"])
@pytest.mark.parametrize("method", ["simpo", "reward"])
def test_publishing_finds_its_places_and_the_snippets_are_python(method, library, tmp_path):
    card = write(tmp_path, identity={"method": method}, facts={"library": library})
    for part in (*PARTS, "begin", "end"):
        assert card.count(f"\n<!-- selfsynth:{part} -->\n") == 1
    assert "<!-- selfsynth:versions -->\n<!-- selfsynth:/versions -->" in card
    load = card.split("<!-- selfsynth:load -->")[1].split("<!-- selfsynth:/load -->")[0]
    assert load.count('"<repo>"') == card.count("<repo>") == 2
    for code in snippets(card.replace('"<repo>"', '"me/x", revision="v1"')):
        compile(code, "card", "exec")


@pytest.mark.parametrize("base", [f"{BASE}-GGUF@{COMMIT}", f"sha256:{COMMIT}"])
@pytest.mark.parametrize("method", ["simpo", "reward"])
def test_the_snippet_of_an_adapter_names_the_gguf_of_its_base(method, base, tmp_path):
    facts = {"library": "peft", "base_gguf": "a.gguf"}
    card = write(tmp_path, identity={"method": method, "base": base}, facts=facts)
    load, _ = snippets(card.replace('"<repo>"', '"me/x", revision="v1"'))
    compile(load, "card", "exec")
    assert 'gguf_file="a.gguf"' in load
    assert (f'"{BASE}-GGUF",' in load) == (f'revision="{COMMIT}"' in load) == ("@" in base)
    assert card.count("<repo>") == 2 and "AutoPeft" not in card


def test_lengths_stand_beside_the_rows(tmp_path):
    facts = {"lengths": {"tokens, chosen": "mean 48, most 240", "over 2,048 tokens": "41"}}
    said = table(write(tmp_path, facts=facts), "of the rows trained on")
    assert said == {name: [value] for name, value in facts["lengths"].items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["transformers", "peft"])
@pytest.mark.parametrize("method", ["simpo", "reward"])
def test_the_snippets_load_and_use_the_model(method, library, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "sky": 1, "blue": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]"
    )
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 1}
    config = transformers.LlamaConfig(vocab_size=3, pad_token_id=0, **sizes, **heads)
    reward = method == "reward"
    kind = "SequenceClassification" if reward else "CausalLM"
    model = getattr(transformers, f"LlamaFor{kind}")(config)
    folder = tmp_path / "model"
    if library == "peft":
        # A base is a language model, whatever is trained on it.
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
        auto = getattr(transformers, f"AutoModelFor{kind}")
        model = auto.from_pretrained(tmp_path / "base", **({"num_labels": 1} if reward else {}))
        task = "SEQ_CLS" if reward else "CAUSAL_LM"
        model = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=2))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card = write(folder, identity={"method": method}, facts={"library": library})
    names = {}
    for code in snippets(card):
        exec(code.replace("<repo>", str(folder)), names)
    said = capsys.readouterr().out
    assert math.isfinite(float(said)) if reward else said


def card_of(folder, name, note, setting):
    """Return a card with these texts in every place for texts."""
    hub = Result(
        name,
        note,
        Estimate(1, 0, 2, 5),
        unit=setting,
        judge=name,
        dataset_id="a/b",
        task_id=note,
        notes=setting,
    )
    other = Result(name, note, Estimate(1, 0, 2, 5), unit=setting, judge=name, notes=setting)
    return write(
        folder,
        [hub, other],
        identity={
            "base": name,
            "dataset": {"run": name, "provenance_sha256": note},
            "dataset_revision": note,
            "extra": {"setting": setting},
        },
        facts={"model_name": name, "base_licence": note, "languages": [setting]},
        parents=[{"repo": name, "commit": note, "type": setting}],
        counts={"asked": 2, "kept": 1, "dropped": {note: 1}},
        engines={name: note},
        command=setting,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return card_of(tmp_path_factory.mktemp("card"), "x", "y", "z")


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(texts, texts, texts)
@example("\n```\n", "---\n", "<!-- selfsynth:end -->")
@example("a: [b", "a|b`c\\", "👩\u200d💻\n---\n")
@example(f"{BASE}@{COMMIT}\n", "<!-- selfsynth:load -->", '"<repo>"')
def test_no_text_breaks_the_card(plain, tmp_path_factory, name, note, setting):
    folder = tmp_path_factory.mktemp("card")
    card = card_of(folder, name, note, setting)

    data = front_matter(card)
    assert ModelCard.load(folder / "README.md").data.to_dict() == data
    _, (result,) = model_index_to_eval_results(data["model-index"])
    assert result.metric_value == 1
    (entry,) = entries_of(folder, "a--b")
    assert entry.value == 1
    changing = ("model-index", "license", "license_name", "language")
    assert {key: value for key, value in data.items() if key not in changing} == {
        key: value for key, value in front_matter(plain).items() if key not in changing
    }
    assert card.count(BEGIN) == card.count(END) == 1
    found = re.findall("<!--.{0,3}selfsynth", card, re.IGNORECASE | re.DOTALL)
    assert len(found) == 2 + len(PARTS)
    assert kinds(card) == kinds(plain)
    assert not re.search("[\u200b\u202a-\u202e\u2066-\u2069\ufeff\x00-\x08\x85\u2028]", card)
