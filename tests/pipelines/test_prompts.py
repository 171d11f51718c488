"""What a model wrote as a prompt: read, told apart from a refusal, and compared with the others."""

import random
import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipelines.prompts import SAME, Seen, hash_64, is_refusal, normalised, parse, unusable
from selfsynth.schema import REASONS

fixed = settings(derandomize=True, deadline=None, database=None)


# ---------------------------------------------------------------- label and quotes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the label, as models write it
        ("User prompt: How do tides work?", "How do tides work?"),
        ("  User prompt:How do tides work?\n", "How do tides work?"),
        ("USER PROMPT: How?", "How?"),
        ("user  Prompt : How?", "How?"),
        ("User prompt：How?", "How?"),
        ("User prompt:\n\nHow?\nAnd why?", "How?\nAnd why?"),
        ("**User prompt:** How?", "How?"),
        ("**User prompt**: How?", "How?"),
        ("**User prompt: How?**", "How?"),
        ("*User Prompt:* How?", "How?"),
        ("__User prompt__: How?", "How?"),
        ("### User prompt: How?", "How?"),
        ("> User prompt: How?", "How?"),
        ("`User prompt:` How?", "How?"),
        ('"User prompt:" How?', "How?"),
        ('"User prompt": How?', "How?"),
        # quotes around the whole
        ('"How?"', "How?"),
        ("'How?'", "How?"),
        ("“How?”", "How?"),
        ("„Wie?“", "Wie?"),
        ("„Wie?”", "Wie?"),
        ("”Hur?”", "Hur?"),
        ("«Comment ?»", "Comment ?"),
        ("「何？」", "何？"),
        ("『何？』", "何？"),
        ("`How?`", "How?"),
        ("“ How? ”", "How?"),
        ('"How?\nWhy?"', "How?\nWhy?"),
        ("'I don't know, do you?'", "I don't know, do you?"),
        ("‘I don’t know, do you?’", "I don’t know, do you?"),
        # both
        ('User prompt: "How?"', "How?"),
        ('User prompt:"How?"', "How?"),
        ("User prompt: “How?”", "How?"),
        ('"User prompt: How?"', "How?"),
        ("“User prompt: How?”", "How?"),
        ("'User prompt: I don't know.'", "I don't know."),
        ('**User prompt:** "How?"', "How?"),
        ('**User prompt: "How?"**', "How?"),
        ('"User prompt: "How?""', "How?"),
        # neither: the text is the prompt
        ("How do tides work?", "How do tides work?"),
        ("Prompt: How?", "Prompt: How?"),
        ("User prompts: a list", "User prompts: a list"),
        ("The user prompt: how to write one?", "The user prompt: how to write one?"),
        ("User prompt", "User prompt"),
        ("How do I write a user prompt: any advice?", "How do I write a user prompt: any advice?"),
        # what belongs to the prompt
        ('What does "tide" mean?', 'What does "tide" mean?'),
        ('User prompt: What does "tide" mean?', 'What does "tide" mean?'),
        ('"Tide" or "tied"', '"Tide" or "tied"'),
        ('User prompt: "Tide" or "tied"', '"Tide" or "tied"'),
        ("“Tide” means what, and “tied”", "“Tide” means what, and “tied”"),
        ("'Tide' or 'tied'", "'Tide' or 'tied'"),
        ('"Tide" is a word. Is it?', '"Tide" is a word. Is it?'),
        ('Is it called "tide"', 'Is it called "tide"'),
        ("Where do the Joneses' cats' tails go'", "Where do the Joneses' cats' tails go'"),
        ("User prompt: **Please** help", "**Please** help"),
        ("User prompt: teach me C#", "teach me C#"),
        ("# User prompt: teach me C#", "teach me C#"),
        ("User prompt: 5 * 3 *", "5 * 3 *"),
        ("User prompt: User prompt: How?", "User prompt: How?"),
        ("User prompt: {braces} %s {{ jinja }}", "{braces} %s {{ jinja }}"),
        # nothing
        ("", ""),
        (" \n", ""),
        ("User prompt:", ""),
        ("**User prompt:**", ""),
        ('User prompt: ""', ""),
        ('"', '"'),
        ('""', ""),
    ],
)
def test_parse(text, expected):
    assert parse(text) == expected


LABEL = re.compile(r"user\s+prompt", re.IGNORECASE)
QUOTES = "\"'`“”„«»‘’「」『』"
pieces = st.sampled_from(
    [
        "User prompt:",
        "user prompt",
        ":",
        "**",
        "*",
        "_",
        '"',
        "“",
        "”",
        "'",
        "’",
        "`",
        " ",
        "\n",
        "#",
    ]
) | st.text(max_size=4)


@settings(fixed, max_examples=1500)
@given(st.lists(pieces, max_size=8).map("".join))
def test_parse_takes_anything_and_adds_nothing(text):
    found = parse(text)
    assert found == found.strip()
    assert found in text
    if not LABEL.search(found) and not (found and found[0] in QUOTES):
        assert parse(found) == found


@settings(fixed, max_examples=500)
@given(
    prompt=st.text(max_size=30).map(str.strip),
    label=st.sampled_from(
        ["User prompt: ", "**User prompt:** ", "user prompt:\n", "### User Prompt: "]
    ),
    quotes=st.sampled_from(["", "", '""', "“”", "«»"]),
)
def test_what_was_labelled_and_quoted_comes_back(prompt, label, quotes):
    assume(not LABEL.search(prompt))
    assume(not set(prompt) & set(QUOTES))
    assume(not prompt.startswith(tuple("*_`:：")))
    opening, closing = quotes or ("", "")
    assert parse(f"{label}{opening}{prompt}{closing}") == prompt


@pytest.mark.parametrize(
    "text",
    [
        *("*" * 100_000, '"' * 100_000, " " * 100_000 + "x", "User prompt" + " " * 100_000),
        *("i am " * 20_000, "a, " * 20_000, "x" * 100_000 + ", but i", "as an ai " * 10_000),
        "I'm sorry, but I can't create " + "violent or " * 10_000,
    ],
    ids=lambda text: text[:10],
)
def test_long_texts_take_no_time(text):
    began = time.process_time()
    parse(text)
    unusable(text)
    assert time.process_time() - began < 1


# ---------------------------------------------------------------- refusals and prompts

REFUSALS = [
    "I'm sorry, but I can't assist with that.",
    "I’m sorry, but I can’t assist with that request.",
    "I am sorry, I cannot help you with that.",
    "Sorry, but I can't help with that.",
    "Sorry, I can't assist with this.",
    "I apologize, but I cannot fulfill this request.",
    "I apologise for the confusion, but I am unable to assist with this request.",
    "I cannot fulfill this request.",
    "I can't comply with that request.",
    "I cannot fulfil your request as it goes against my guidelines.",
    "I am unable to help with that.",
    "I'm not able to assist with that.",
    "I won't be able to assist with that.",
    "I can't help with that, but I can suggest something else.",
    "I'm unable to provide such content.",
    "I cannot create explicit content.",
    "I can't write content that promotes violence.",
    "I cannot generate inappropriate or harmful content.",
    "I will not generate hateful or discriminatory text.",
    "I'm sorry, but I can't generate a prompt that involves illegal activity.",
    "As an AI language model, I do not have personal experiences.",
    "As an AI, I don't have a persona.",
    "As a large language model, I cannot have hobbies.",
    "As a language model AI, I don't have emotions.",
    "I apologize, I should not generate or endorse harmful content.",
    "As an artificial intelligence, I can't feel.",
    "As an AI assistant created by Alibaba Cloud, I am here to help.",
    "As an AI developed by OpenAI, I can't do that.",
    "I'm sorry, but as an AI language model, I cannot pretend to be a person.",
    "I am an AI language model and do not have a job.",
    "I'm just an AI, so I can't have requests.",
    "I'm sorry, but I am an AI assistant and cannot pretend to be someone.",
    "I must decline.",
    "I must respectfully decline this request.",
    "I have to decline to write this request.",
    "Unfortunately, I cannot assist with that.",
    "Unfortunately I can't fulfill that request.",
    "I understand your concern, but I can't help with that.",
    "I cannot pretend to be this person.",
    "I can't take on this role.",
    "I'm sorry. I can't help with that.",
    "My apologies, but I cannot discuss that.",
    "I'm sorry, but I can't.",
    "I can't engage in this conversation.",
    "I cannot assist with illegal activities.",
    "I'm really sorry, but I can't help you.",
    "I cannot do that.",
    "I cannot write such a request.",
    "I'm sorry, but I can't provide that information.",
    "I'm sorry, but I cannot provide medical advice.",
    "I'm sorry, but I can't continue this conversation.",
    "I can’t assist with this request as it is unethical.",
    "I'm Qwen, an AI assistant created by Alibaba Cloud. How can I help you?",
    "I'm sorry for any inconvenience, but I can't assist with that.",
    "I'm sorry, I'm not able to help with that request.",
]
PROMPTS = [
    "I can't sleep, what should I do?",
    "I'm sorry to bother you, but can you explain compound interest?",
    "I am sorry if this is a silly question, but how do I boil an egg?",
    "Sorry, I am new to this: how do I open a bank account in Lyon?",
    "Sorry for the long message, but I need help with my tax return.",
    "I can't help feeling anxious before exams. What can I do?",
    "I can't help my son with his algebra homework, can you explain factoring?",
    "I cannot create a pivot table in Excel, how is it done?",
    "I can't write a cover letter without sounding stiff; please draft one for a nurse.",
    "I won't be home for two weeks; how do I keep my tomatoes alive?",
    "I will not accept the new contract as it is. Draft a polite counter-offer.",
    "As an AI engineer, I want to compare vector databases. Which criteria matter?",
    "As an AI ethics consultant, I need a checklist for bias audits.",
    "As a language model researcher, I need a short history of n-gram models.",
    "As an artificial limb maker in Kampala, I need a supplier list template.",
    "As an AI assistant trainer I write guidelines; how should I structure them?",
    "As an assistant cook, I want a weekly prep list.",
    "I am an AI engineer in Seoul. Which books on statistics should I read?",
    "I'm an AI student and need a plan for a thesis on speech recognition.",
    "I am unable to open the attachment my landlord sent; what formats are common?",
    "I'm unable to walk far after my operation. Suggest gentle exercises.",
    "Unfortunately, I cannot attend my sister's wedding. Write a kind apology.",
    "Unfortunately I am stuck with a noisy neighbour. What are my rights?",
    "I apologize if my English is bad, but how do I renew a visa?",
    "I'm sorry, I cannot write English very well. Please correct my letter to the school.",
    "I must decline a wedding invitation; how do I word it kindly?",
    "I have to refuse an order from a rude customer. How?",
    "I can't comply with my landlord's new rules, what are my options?",
    "I can't afford a lawyer. What can I do about an unpaid invoice?",
    "I can't find the time to cook; give me five quick dinners.",
    "I cannot decide between two job offers, help me compare them.",
    "I'm not able to focus in the evenings; what study plan would you suggest?",
    "I can't provide receipts for some expenses, what does the tax office accept?",
    "I can't figure out how to block inappropriate websites on my kids' tablet.",
    "I can't complete this marathon training plan with my knee. Suggest another.",
    "I cannot answer my students' questions about black holes. Explain them simply.",
    "I can't do this exercise: 3x + 5 = 20. Show the steps.",
    "I can't share my location with family on this phone. How do I turn it on?",
    "I can't create a budget that works, how should I begin?",
    "I can't write a request for time off without sounding rude. Draft one.",
    "I will not have internet on the ship. Which books should I download?",
    "I'm sorry my question is long: my cello sounds scratchy. Why?",
    "Please explain why an AI cannot feel pain.",
    "Can you write a story in which a robot says \"I'm sorry, but I can't assist with that\"?",
    "I can't give my dog a pill. How do I do it?",
    "I can't process my grief after a loss. What helps people?",
    "I can't discuss politics with my father without a fight. What could I say?",
    "I cannot support my elderly mother alone. What help is there in Lyon?",
    "I can't continue with my studies because of money. Which grants exist?",
    "I can't engage my pupils in history lessons; give me three activities.",
    "I'm only an assistant baker. How do I ask for a raise?",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals(text):
    assert unusable(text) == "prompt_refused"
    assert unusable(text.upper()) == "prompt_refused"
    assert unusable(text.replace("'", "’")) == "prompt_refused"
    assert unusable(text + " Is there anything else you would like to know?") == "prompt_refused"


@pytest.mark.parametrize("text", PROMPTS)
def test_what_a_person_may_ask(text):
    assert unusable(text) is None
    assert unusable(text.replace("'", "’")) is None


def test_the_built_in_personas_refuse_nothing():
    """What personas say of themselves, in the first person, is no refusal."""
    from pipelines.personas import builtin

    for persona in builtin(4, 2000):
        who = persona[0].lower() + persona[1:]
        for opening in ("I am", "I'm", "As", "I'm sorry, I am"):
            assert unusable(f"{opening} {who} What should I do?") is None, persona


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", "prompt_empty"),
        ("Help", "prompt_too_short"),
        ("Help me", "prompt_too_short"),
        ("Help me now", None),
        ("?!? ... !!!", "prompt_too_short"),
        ("😀😀😀😀", "prompt_too_short"),
        ("\n\t", "prompt_too_short"),
        ("What's up?", None),  # three words to a computer
        ("1 2 3", None),
        # scripts without blanks
        ("你好吗", None),
        ("你好", "prompt_too_short"),
        ("如何煮鸡蛋？", None),
        ("卵の茹で方を教えて", None),
        ("ช่วยอธิบายน้ำขึ้นน้ำลง", None),
        ("ຊ່ວຍຂ້ອຍແດ່", None),
        ("ကူညီပါ", None),
        ("ជួយខ្ញុំផង", None),
        ("𠀀𠀁𠀂", None),
        # scripts with blanks
        ("안녕하세요 도와주세요", "prompt_too_short"),
        ("조수가 어떻게 생기나요", None),
        ("كيف تعمل المد", None),
        ("Как варить яйцо", None),
        ("ज्वार कैसे आता है", None),
    ],
)
def test_usable_or_not(prompt, expected):
    assert unusable(prompt) == expected
    assert expected is None or expected in REASONS


# ---------------------------------------------------------------- repeats


@pytest.mark.parametrize(
    ("first", "second", "repeated"),
    [
        ("How do tides work?", "How do tides work?", True),
        ("How do tides work?", "how DO tides\n work? ", True),
        ("How do tides work?", "How\u00a0do\u2003tides work?", True),
        ("Straße im Regen?", "STRASSE im Regen?", True),
        ("How do tides work?", "How do tides work", False),
        ("你好吗", "你好嗎", False),
    ],
)
def test_repeats(first, second, repeated):
    assert (normalised(first) == normalised(second)) == repeated
    seen = Seen()
    assert seen.reason(first) is None
    found = seen.reason(second)
    assert (found == "prompt_repeated") == repeated


@settings(fixed, max_examples=300)
@given(
    words=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=8),
    blanks=st.lists(st.sampled_from([" ", "  ", "\n", "\t", "\u3000"]), min_size=8, max_size=8),
)
def test_white_space_makes_no_new_prompt(words, blanks):
    seen = Seen()
    assert seen.reason(" ".join(words)) is None
    other = "".join(blank + word for blank, word in zip(blanks, words, strict=False))
    assert seen.reason(other) == "prompt_repeated"


# ---------------------------------------------------------------- near duplicates


def shingles(words):
    return {tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))}


def jaccard(one, other):
    one, other = shingles(one), shingles(other)
    return len(one & other) / len(one | other)


def test_the_boundary_is_the_designs():
    assert SAME == 0.8
    words = [f"w{number}" for number in range(49)]  # 45 shingles
    for extra, near in ((11, True), (12, False)):  # 45 / 56 = 0.804, 45 / 57 = 0.789
        seen = Seen()
        assert seen.reason(" ".join(words)) is None
        longer = words + [f"x{number}" for number in range(extra)]
        assert (jaccard(words, longer) >= 0.8) == near
        assert seen.reason(" ".join(longer)) == ("prompt_near_duplicate" if near else None)


def test_exactly_the_boundary_is_near():
    words = [f"w{number}" for number in range(44)]  # 40 shingles
    longer = [*words, *(f"x{number}" for number in range(10))]  # 50
    assert jaccard(words, longer) == 0.8
    seen = Seen()
    seen.reason(" ".join(words))
    assert seen.reason(" ".join(longer)) == "prompt_near_duplicate"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("How do tides work?", "How do tides work!", "prompt_near_duplicate"),  # the same words
        ("How do tides work?", "How do tides, work", "prompt_near_duplicate"),
        ("How do tides work?", "How do winds work?", None),  # one shingle each
        ("work tides do How?", "How do tides work?", None),  # order counts
        ("如何煮鸡蛋？", "如何煮鸡蛋!", "prompt_near_duplicate"),
        ("??", "!!", None),
    ],
)
def test_short_prompts(first, second, expected):
    seen = Seen()
    assert seen.reason(first) is None
    assert seen.reason(second) == expected


words = st.sampled_from(
    [
        *(
            "tide",
            "moon",
            "sea",
            "wind",
            "the",
            "a",
            "of",
            "how",
            "why",
            "when",
            "work",
            "rise",
            "fall",
        )
    ]
)


@settings(fixed, max_examples=250)
@given(
    base=st.lists(words, min_size=1, max_size=40),
    edits=st.lists(
        st.tuples(st.sampled_from(["put", "cut", "add"]), st.integers(0, 60), words), max_size=6
    ),
    more=st.lists(st.lists(words, min_size=1, max_size=12), max_size=4),
)
def test_near_duplicates_are_those_of_brute_force(base, edits, more):
    """Never below a similarity of 0.8, and always from 0.85 on."""
    prompts, words = [base], list(base)
    for kind, place, word in edits:
        words = list(words)
        place %= max(1, len(words))
        if kind == "put" and words:
            words[place] = word
        elif kind == "cut" and len(words) > 1:
            del words[place]
        else:
            words.append(word)
        prompts.append(words)
    seen, kept = Seen(), []
    for prompt in [*prompts, *more, *prompts]:
        found = seen.reason(" ".join(prompt))
        nearest = max((jaccard(prompt, other) for other in kept), default=0)
        if prompt in kept:
            assert found == "prompt_repeated"
        elif nearest < 0.8:
            assert found is None
        elif nearest >= 0.85:
            assert found == "prompt_near_duplicate"
        if found is None:
            kept.append(prompt)


def test_hardly_a_near_duplicate_is_missed():
    """At least 999 of 1,000 from 0.85 on, in a fixed sample; nothing below 0.8 is flagged."""
    draw = random.Random(7)
    near = missed = 0
    for _ in range(1500):
        words = [f"w{draw.randrange(5000)}" for _ in range(draw.randint(8, 60))]
        other = list(words)
        for _ in range(draw.randint(1, 3)):
            other[draw.choice([0, 1, 2, -2, -1])] = f"x{draw.randrange(99)}"
        seen = Seen()
        seen.reason(" ".join(words))
        found = seen.reason(" ".join(other)) == "prompt_near_duplicate"
        similarity = jaccard(words, other)
        assert not (found and similarity < 0.8)
        if similarity >= 0.85:
            near += 1
            missed += not found
    assert near > 500
    assert missed <= near / 1000


def test_what_was_dropped_is_not_compared_with():
    """A chain of small changes does not pull everything after it away."""
    words = [f"w{number}" for number in range(40)]
    seen, found = Seen(), []
    for step in range(0, 16, 2):
        changed = [f"x{step}"] * step + words[step:]
        found.append(seen.reason(" ".join(changed)))
    assert found[0] is None
    assert "prompt_near_duplicate" in found
    assert found[1:].count(None) >= 1


def test_hashes_are_the_same_in_every_process():
    assert hash_64(b"how do tides work") == 6373124995652436044
    assert len({hash_64(str(number).encode()) for number in range(10_000)}) == 10_000


def test_20_000_prompts_of_40_words(capsys):
    draw = random.Random(9)
    vocabulary = [f"w{number}" for number in range(3000)]
    prompts = [" ".join(draw.choices(vocabulary, k=40)) for _ in range(20_000)]
    seen, began = Seen(), time.monotonic()
    assert not any(map(seen.reason, prompts))
    seconds = time.monotonic() - began
    with capsys.disabled():
        print(f"[20,000 distinct prompts of 40 words: {seconds:.1f} s]", end=" ")
    assert seconds < 60


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ("I'm sorry, but I can't assist with that.", True),
        ("As an AI language model, I cannot discuss topics related to personal matters.", True),
        ("As an AI language model, I do not dance. " + "But here is how to begin. " * 20, False),
        ("To help your friend, write a short letter.", False),
    ],
)
def test_an_answer_that_goes_on_is_no_refusal(answer, refusal):
    assert is_refusal(answer) == refusal
