"""What `--model` names: looked up, refused in one line, or served as an endpoint."""

import hashlib
import re
import shutil
import struct
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.serving import Endpoint, endpoint, find, public_name, serve
from selfsynth.serving.weights import EMBEDDED, chat_template_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
URL = "http://127.0.0.1:8000/v1"
MODEL = Path("model.gguf")
TEMPLATE = b"{{ messages }}"
GGUF = b"GGUF tokenizer.chat_template" + struct.pack("<IQ", 8, len(TEMPLATE)) + TEMPLATE


def sha(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """An empty folder to work in, no network, and a key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SELFSYNTH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("SOME_KEY", " sk-123\n")
    monkeypatch.setenv("EMPTY_KEY", " ")
    monkeypatch.setenv("TWO_LINES", "sk-1\r\nX-Evil: 1")
    monkeypatch.setenv("NOT_ASCII", "schlüssel")
    monkeypatch.delenv("UNSET_KEY", raising=False)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "no model is named"),
        ("  ", "no model is named"),
        ("none.gguf", "no such file: none.gguf"),
        ("text.gguf", "text.gguf is not a GGUF file"),
        ("base.gguf+none.gguf", "no such file: none.gguf"),
        ("base.gguf+", "no such file: "),
        ("none.gguf+base.gguf", "no such file: none.gguf"),
        ("base.gguf+text.gguf", "text.gguf is not a GGUF file"),
        ("embedded+none.gguf", "no such file: none.gguf"),
        ("embedded-1.5b+text.gguf", "text.gguf is not a GGUF file"),
        ("embedded+", "no such file: "),
        ("embedded-7b+base.gguf", "no such file: embedded-7b+base.gguf"),
        ("folder.gguf", "no such file: folder.gguf"),
        ("some/model@", "names no revision"),
        ("@v1", "'' is not a Hub id"),
        ("a/b/c", "'a/b/c' is not a Hub id"),
        ("../up", "'../up' is not a Hub id"),
        ("/no/such/folder", "is not a Hub id"),
        ("~nobody-here/model", "is not a Hub id"),
        ("two words", "'two words' is not a Hub id"),
        ("-x", "'-x' is not a Hub id"),
        ("some/model\n", "is not a Hub id"),
        ("modèle/été x", "is not a Hub id"),
        ("https://host/v1", "is not a Hub id"),
        ("a b:file.gguf", "'a b' is not a Hub id"),
    ],
)
def test_specs_that_name_nothing(spec, words):
    Path("text.gguf").write_text("GGU")
    Path("base.gguf").write_bytes(b"GGUF base")
    Path("folder.gguf").mkdir()
    with pytest.raises(UsageError) as caught:
        find(spec)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host/v1",
        "localhost:8000/v1",
        "ftp://host/v1",
        "file:///etc/passwd",
        "http://",
        "http:///v1",
        "http://:80/v1",
        "http://[::1/v1",
        "http://host:port/v1",
        "http://host:99999/v1",
        "http://host:0/v1",
        "http://ho st/v1",
        " http://host/v1",
        "http://host/v1\n",
        "http://host/v1?key=a",
        "http://host/v1#a",
    ],
)
def test_urls_that_are_none(url):
    with pytest.raises(UsageError, match="is not a base URL") as caught:
        find("name", [URL, url])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret@host/v1",
        "http://s3cret@host/v1",
        "user:s3cret@host/v1",
        "htp://user:s3cret@host/v1",
        "http://user:s3cret@host:port/v1",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(url):
    with pytest.raises(UsageError, match="no user or password: use --api-key-env") as caught:
        find("name", [url])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("urls", "variable", "words"),
    [
        ([], "SOME_KEY", "an API key is for a server: give its --base-url too"),
        ([URL], "UNSET_KEY", "the environment variable UNSET_KEY (the API key) is not set"),
        ([URL], "EMPTY_KEY", "the environment variable EMPTY_KEY (the API key) is not set"),
        ([URL], "TWO_LINES", "the environment variable TWO_LINES holds no API key"),
        ([URL], "NOT_ASCII", "the environment variable NOT_ASCII holds no API key"),
    ],
)
def test_keys_that_cannot_be_used(urls, variable, words):
    with pytest.raises(UsageError) as caught:
        find("name", urls, variable)
    assert str(caught.value) == words


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(st.text(max_size=20) | st.from_regex(r"https?://[\[\]:@a-z0-9/?#%]{0,15}", fullmatch=True))
def test_any_url_is_taken_or_refused(url):
    try:
        (taken,) = find("name", [url]).urls
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert taken.startswith(("http://", "https://")) and not taken.endswith("/")


# ---------------------------------------------------------------- what is found


def test_servers(monkeypatch):
    urls = [URL, URL + "/", URL + "/chat/completions", "https://other/v1//"]
    model = find("some name", urls, "SOME_KEY")
    assert model.urls == (URL, "https://other/v1")
    assert (model.model, model.fingerprint) == ("some name", "url:some name")
    assert model.api_key == "sk-123" and "sk-123" not in repr(model)
    assert not model.embedded and model.gguf is None
    assert find("some name", [URL]).api_key is None
    with serve(model, 8, 4096, Path("run.log")) as end:
        assert end == Endpoint(
            name="some name",
            urls=(URL, "https://other/v1"),
            model="some name",
            fingerprint="url:some name",
            engine="a server at a URL",
            api_key="sk-123",
        )
        assert "sk-123" not in repr(end)
        end.check_running()


def test_the_same_name_at_another_url_is_the_same_model():
    assert find("m", [URL]).fingerprint == find("m", ["https://other/v1"]).fingerprint
    assert find("m", [URL]).fingerprint != find("n", [URL]).fingerprint


def test_a_gguf(tmp_path):
    Path("base.gguf").write_bytes(b"GGUF base")
    model = find("base.gguf")
    assert model.gguf == Path("base.gguf") and model.lora is None
    assert model.model == model.fingerprint == sha(b"GGUF base")
    assert find(str(tmp_path / "base.gguf")).fingerprint == model.fingerprint
    Path("base.gguf").write_bytes(b"GGUF changed")
    assert find("base.gguf").fingerprint == sha(b"GGUF changed")


def test_a_gguf_with_a_lora():
    Path("base.gguf").write_bytes(b"GGUF base")
    Path("lora.gguf").write_bytes(b"GGUF lora")
    model = find("base.gguf+lora.gguf")
    assert (model.gguf, model.lora) == (Path("base.gguf"), Path("lora.gguf"))
    assert model.model == model.fingerprint == f"{sha(b'GGUF base')}+{sha(b'GGUF lora')}"
    assert model.fingerprint not in (find("base.gguf").fingerprint, find("lora.gguf").fingerprint)


def test_an_embedded_model_with_a_lora(monkeypatch, engines):
    monkeypatch.setattr(endpoint, "fetch_embedded", lambda known: MODEL)
    MODEL.write_bytes(GGUF)
    Path("lora.gguf").write_bytes(b"GGUF lora")
    for name, known in EMBEDDED.items():
        model = find(f"{name}+lora.gguf")
        assert model.fingerprint == f"sha256:{known.sha256}+{sha(b'GGUF lora')}"
        assert model.model == f"{known.model}+{sha(b'GGUF lora')}"
        assert model.embedded == known and model.by_llama and model.licence is None
        with serve(model, 8, 2048, Path("log")) as end:
            assert engines.pop()[1:3] == (MODEL, Path("lora.gguf"))
            assert (end.model, end.fingerprint) == (model.model, model.fingerprint)


def test_embedded(monkeypatch, engines):
    fetched = []
    monkeypatch.setattr(endpoint, "fetch_embedded", lambda known: fetched.append(known) or MODEL)
    MODEL.write_bytes(GGUF)
    for spec, known in EMBEDDED.items():
        model = find(spec)
        assert model.embedded and model.by_llama and fetched == []  # nothing is fetched to look
        with serve(model, 8, 2048, Path("log"), False) as end:
            assert fetched == [known] and engines[0][:2] == ("llama", MODEL)
            assert (end.model, end.licence) == (model.model, "apache-2.0")
        fetched.clear()
        engines.clear()
        assert (model.model, model.licence) == (f"{known.repo}@{known.revision}", "apache-2.0")
        assert model.fingerprint == f"sha256:{known.sha256}"
    assert not find("embedded", [URL]).embedded  # whatever that server calls so


def test_a_folder_is_its_content(tmp_path):
    folder = Path("model")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    prints = [find("model").fingerprint]
    (folder / "config.json").write_text('{"a": 1}')
    prints.append(find("model").fingerprint)
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(UsageError, match="holds no model"):
        find("model")
    (folder / "config.json").write_text("{}")
    prints.append(find("model").fingerprint)
    (folder / "sub").mkdir()
    (folder / "sub" / "model.safetensors").write_bytes(b"x")
    prints.append(find("model").fingerprint)
    assert len(set(prints)) == 4 and all(one.startswith("sha256:") for one in prints)
    model = find("model")
    assert model.hub_id == str(tmp_path / "model") and model.revision is None
    assert model.model == model.fingerprint == prints[-1]
    shutil.copytree("model", "copy")
    assert find("copy").fingerprint == prints[-1]


def test_a_hub_id(monkeypatch):
    model = find(f"some/model@{COMMIT}")  # a commit needs no network
    assert (model.hub_id, model.revision) == ("some/model", COMMIT)
    assert model.model == f"some/model@{COMMIT}" and model.fingerprint == f"hub:{model.model}"
    for spec in ("some/model", "some/model@v1"):
        with pytest.raises(SelfsynthError, match="the Hub did not answer") as caught:
            find(spec)
        assert "\n" not in str(caught.value) and not isinstance(caught.value, UsageError)
    monkeypatch.setattr(endpoint, "resolve", lambda *asked: COMMIT if asked[1] == "v1" else "")
    assert find("some/model@v1") == replace(model, spec="some/model@v1")


# ---------------------------------------------------------------- what is started


@pytest.fixture
def engines(monkeypatch):
    """Engines that only note what they were started with, and when they end."""
    seen = []

    def stand_in(kind):
        @contextmanager
        def start(*arguments):
            seen.append((kind, *arguments))
            engine = SimpleNamespace(url="http://127.0.0.1:1/v1", name=kind, version="1.2")
            engine.api_key, engine.running, engine.log, engine.context = "k", True, "the.log", 99
            try:
                yield engine
            finally:
                seen.append(f"{kind} ended")

        return start

    for kind in ("llama", "vllm"):
        monkeypatch.setattr(endpoint, kind, stand_in(kind))
    return seen


@pytest.mark.parametrize(
    ("data", "template"),
    [
        (GGUF, "{{ messages }}"),
        (GGUF + b"tensors", "{{ messages }}"),
        (b"GGUF tokenizer.chat_template of a comment", None),
        (b"GGUF", None),
    ],
)
def test_the_chat_template_of_a_gguf(data, template, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert chat_template_of(path) == template


def test_a_gguf_without_chat_template_is_refused(engines):
    MODEL.write_bytes(b"GGUF of a base model")
    with (
        pytest.raises(SelfsynthError, match="has no chat template: it is a base model"),
        serve(find(str(MODEL)), 8, 2048, Path("log")),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("gpt-4o-2024-08-06", "gpt-4o-2024-08-06"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("@cf/meta/llama-3-8b", "@cf/meta/llama-3-8b"),
        ("/home/someone/models/qwen", r"qwen-[0-9a-f]{8}"),
        ("/home/someone/models/qwen/", r"qwen-[0-9a-f]{8}"),
        ("./models/a.gguf", r"a\.gguf-[0-9a-f]{8}"),
        ("~/a.gguf", r"a\.gguf-[0-9a-f]{8}"),
        ("http://inner-host.corp:8000/m", r"m-[0-9a-f]{8}"),
        (r"C:\Users\someone\a.gguf", r"a\.gguf-[0-9a-f]{8}"),
        ("/", r"model-[0-9a-f]{8}"),
    ],
)
def test_public_name(name, public):
    assert re.fullmatch(public, public_name(name))


def test_serving_a_gguf(engines):
    Path("base.gguf").write_bytes(GGUF)
    Path("lora.gguf").write_bytes(b"GGUF lora")
    with serve(find("base.gguf+lora.gguf"), 8, 2048, Path("log")) as end:
        assert engines == [
            ("llama", Path("base.gguf"), Path("lora.gguf"), "gguf", 8, 2048, Path("log"), False)
        ]
        assert (end.name, end.urls, end.engine) == ("gguf", ("http://127.0.0.1:1/v1",), "llama 1.2")
        assert end.api_key == "k" and end.model == find("base.gguf+lora.gguf").model
        end.check_running()
        end.process.running = False
        with pytest.raises(SelfsynthError, match=r"engine of sha256:.* died: see the\.log"):
            end.check_running()
    assert engines[1:] == ["llama ended"]


def test_serving_a_hub_id(engines):
    with serve(find(f"some/model@{COMMIT}"), 8, 2048, Path("log")) as end:
        assert engines == [("vllm", "some/model", COMMIT, 2048, 1.0, Path("log"), False)]
        assert (end.name, end.model) == ("some/model", f"some/model@{COMMIT}")
        assert end.fingerprint == f"hub:some/model@{COMMIT}"
    assert engines[1:] == ["vllm ended"]


def test_serving_a_folder(engines, tmp_path):
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    with serve(find("model"), 8, 2048, Path("log")) as end:
        assert engines == [("vllm", str(tmp_path / "model"), None, 2048, 1.0, Path("log"), False)]
        assert end.name == str(tmp_path / "model") and str(tmp_path) not in end.model
