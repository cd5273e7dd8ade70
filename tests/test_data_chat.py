"""Loss masks of conversations, token by token, for templates of the shapes in use."""

from __future__ import annotations

import pytest

from harness import chat_masks
from harness.data_sources import Row
from harness.encoders import ChatEncoder, PromptEncoder, TextTokenizer, choose_objective, special_tokens
from harness.findings import UserError
from tests.data_tokenizers import byte_tokenizer, word_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{% set last_user = turns | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if m == last_user and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REASONING = (  # thoughts of earlier turns are dropped, and the last turn always shows its thoughts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{{ '\n' }}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>")
SPECIAL += ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "[INST]", "[/INST]")

TWO_TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello é"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]


def encode(template, messages, tools=None, column="messages", **options):
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.chat_template = template
    encoder = ChatEncoder(TextTokenizer(tokenizer), column, options.get("train_on_prompt", False))
    rows = [Row({column: messages, **({"tools": tools} if tools is not None else {})}, "chat.jsonl, line 7")]
    return encoder.encode(rows), tokenizer


def parts_of(encoded, tokenizer):
    """(text, trained) of each run of equal mask, document by document."""
    documents, position = [], 0
    for length in encoded.lengths.tolist():
        ids, mask = encoded.tokens[position : position + length].tolist(), encoded.mask[position : position + length].tolist()
        position += length
        parts = []
        for token, trained in zip(ids, mask, strict=True):
            if not parts or parts[-1][1] != trained:
                parts.append(([], trained))
            parts[-1][0].append(token)
        documents.append([(tokenizer.decode(tokens), trained) for tokens, trained in parts])
    return documents


EXPECTED = {
    "chatml": (
        CHATML,
        [
            ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
            ("Hello é<|im_end|>", 1),
            ("\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", 0),
            ("So long<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "llama3": (
        LLAMA3,
        [
            ("<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", 0),
            ("Hello é<|eot_id|>", 1),
            ("<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", 0),
            ("So long<|eot_id|>", 1),
        ],
    ),
    "mistral": (
        MISTRAL,
        [("<s>[INST] Hi [/INST]", 0), (" Hello é</s>", 1), ("[INST] Bye [/INST]", 0), (" So long</s>", 1)],
    ),
    "gemma": (
        GEMMA,
        [
            ("<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", 0),
            ("Hello é<end_of_turn>", 1),
            ("\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n", 0),
            ("So long<end_of_turn>", 1),
            ("\n", 0),
        ],
    ),
    "phi": (
        PHI,
        [
            ("<|user|>\nHi<|end|>\n<|assistant|>\n", 0),
            ("Hello é<|end|>", 1),
            ("\n<|user|>\nBye<|end|>\n<|assistant|>\n", 0),
            ("So long<|end|>\n</s>", 1),
        ],
    ),
    "zephyr": (
        ZEPHYR,
        [
            ("<|user|>\nHi</s>\n<|assistant|>\n", 0),
            ("Hello é</s>", 1),
            ("\n<|user|>\nBye</s>\n<|assistant|>\n", 0),
            ("So long</s>", 1),
            ("\n", 0),
        ],
    ),
    "marked": (
        MARKED,
        [
            ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
            ("Hello é<|im_end|>", 1),
            ("\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", 0),
            ("So long<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "plain": (  # knows no generation prompt: the role's name is not trained on all the same
        PLAIN,
        [
            ("user: Hi</s>\nassistant: ", 0),
            ("Hello é</s>", 1),
            ("\nuser: Bye</s>\nassistant: ", 0),
            ("So long</s>", 1),
            ("\n", 0),
        ],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_masks_token_by_token(name):
    template, expected = EXPECTED[name]
    encoded, tokenizer = encode(template, TWO_TURNS)
    assert encoded.problems == []
    assert parts_of(encoded, tokenizer) == [expected]
    ids = [token for text, _ in expected for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    mask = [trained for text, trained in expected for _ in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert encoded.tokens.tolist() == ids
    assert encoded.mask.tolist() == mask


def test_a_template_that_rewrites_earlier_turns_gives_a_sample_per_turn():
    messages = [dict(message) for message in TWO_TURNS]
    messages[1]["reasoning_content"] = "hm"
    encoded, tokenizer = encode(REASONING, messages)
    first = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert parts_of(encoded, tokenizer) == [
        [(first, 0), ("<think>\nhm\n</think>\n\nHello é<|im_end|>", 1), ("\n", 0)],
        [
            (first + "Hello é<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", 0),
            ("<think>\n\n</think>\n\nSo long<|im_end|>", 1),
            ("\n", 0),
        ],
    ]
    assert list(encoded.notes.values()) == [1]


def test_mistral_moves_the_system_turn_and_so_gives_a_sample_per_turn():
    encoded, tokenizer = encode(MISTRAL, [{"role": "system", "content": "Be brief"}, *TWO_TURNS])
    assert parts_of(encoded, tokenizer)[1] == [
        ("<s>[INST] Hi [/INST] Hello é</s>[INST] Be brief\n\nBye [/INST]", 0),
        (" So long</s>", 1),
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("field", [{"train": False}, {"weight": 0}])
def test_a_turn_can_be_left_out(template, field):
    messages = [dict(message) for message in TWO_TURNS]
    messages[1].update(field)
    encoded, tokenizer = encode(template, messages)
    trained = [text for document in parts_of(encoded, tokenizer) for text, mask in document if mask]
    assert trained == ["So long<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_user_turn_can_be_trained_on(template):
    messages = [dict(message) for message in TWO_TURNS]
    messages[0]["train"] = True
    encoded, tokenizer = encode(template.replace("{% generation %}", "").replace("{% endgeneration %}", ""), messages)
    trained = [text for document in parts_of(encoded, tokenizer) for text, mask in document if mask]
    assert trained == ["Hi<|im_end|>", "Hello é<|im_end|>", "So long<|im_end|>"]


def test_sharegpt_names_and_train_on_prompt():
    turns = [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
    encoded, tokenizer = encode(CHATML, turns, column="conversations")
    assert parts_of(encoded, tokenizer) == [
        [
            ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
            ("Yo<|im_end|>", 1),
            ("\n", 0),
        ]
    ]
    whole, tokenizer = encode(CHATML, turns, column="conversations", train_on_prompt=True)
    assert whole.tokens.tolist() == encoded.tokens.tolist()
    assert whole.mask.all()


def test_tools_reach_the_template():
    template = "{% if tools %}<tools>{{ tools[0].name }}</tools>\n{% endif %}" + CHATML
    encoded, tokenizer = encode(template, TWO_TURNS[:2], tools='[{"name": "clock"}]')
    assert parts_of(encoded, tokenizer)[0][0] == ("<tools>clock</tools>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0)


CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}]}


def test_a_template_that_leaves_tool_calls_out_is_refused():
    messages = [TWO_TURNS[0], CALL, {"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "Noon"}]
    encoded, _ = encode(CHATML, messages)
    assert len(encoded.lengths) == 0
    assert "leaves out the call of clock in turn 2" in encoded.problems[0].message
    knows = CHATML.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}")
    assert knows != CHATML
    encoded, tokenizer = encode(knows, messages)
    assert [text for text, mask in parts_of(encoded, tokenizer)[0] if mask] == ["[clock]<|im_end|>", "Noon<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content", r"unexpected end of template.* \(line 1\)"),
        ("{{ bos_token }}\n{% fur m in messages %}", r"unknown tag 'fur'.* \(line 2\)"),
    ],
)
def test_a_template_that_is_none_is_one_message(template, reason):
    tokenizer = byte_tokenizer(chat_template=template)
    with pytest.raises(UserError, match=r"--chat_template: is no template: .*" + reason):
        ChatEncoder(TextTokenizer(tokenizer), "messages", False)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "Hi"}], "no turn to train on: its roles are user, none is assistant"),
        ([{"role": "user", "content": "Hi"}, {"role": "wizard", "content": "Ho"}], "its roles are user, wizard, none is assistant"),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "train": False}], "is marked as not trained"),
        ([], "not an empty one"),
        ("Hi", "not text"),
        ([{"role": "user"}], "turn 1 (user) has no content"),
        ([{"content": "Hi"}], "turn 1 has no role, only content"),
        ([{"role": "user", "content": 3}], "turn 1 has a int as content"),
        (["Hi"], "turn 1 is a str"),
        ([{"role": "assistant", "content": "Hi", "weight": 0.5}], "turn 1 has weight 0.5"),
        ([{"role": "user", "content": [{"type": "image"}]}], "turn 1 has content that is not text"),
    ],
)
def test_conversations_that_cannot_be_used_are_named(messages, reason):
    encoded, _ = encode(CHATML, messages)
    assert len(encoded.lengths) == 0
    assert len(encoded.problems) == 1
    assert "chat.jsonl, line 7" in encoded.problems[0].message
    assert reason in encoded.problems[0].message


def test_what_the_template_refuses_is_named():
    encoded, _ = encode(GEMMA, [{"role": "system", "content": "S"}, *TWO_TURNS])
    assert "no system turn" in encoded.problems[0].message
    encoded, _ = encode(MISTRAL, [TWO_TURNS[0], TWO_TURNS[0], TWO_TURNS[1]])
    assert "roles must alternate" in encoded.problems[0].message


def test_a_template_that_cannot_be_taken_apart_is_refused():
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    encoded, _ = encode(template, TWO_TURNS)
    assert len(encoded.lengths) == 0
    assert "does not show where turn 2 begins" in encoded.problems[0].message


def test_a_conversation_that_begins_with_the_assistant():
    messages = [{"role": "assistant", "content": "How can I help?"}, *TWO_TURNS[:2]]
    encoded, tokenizer = encode(LLAMA3, messages)
    assert parts_of(encoded, tokenizer) == [
        [
            ("<s><|start_header_id|>assistant<|end_header_id|>\n\n", 0),
            ("How can I help?<|eot_id|>", 1),
            ("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", 0),
            ("Hello é<|eot_id|>", 1),
        ]
    ]


def test_no_template_at_all_is_refused():
    with pytest.raises(UserError, match="no chat template"):
        ChatEncoder(TextTokenizer(byte_tokenizer()), "messages", False)


def test_turns_without_an_end_token_are_noted():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    encoded, tokenizer = encode(template, TWO_TURNS)
    assert [text for text, mask in parts_of(encoded, tokenizer)[0] if mask] == ["Hello é\n", "So long\n"]
    assert [note.split(":")[0] for note in encoded.notes] == ["conversations have an assistant turn without an end token"]


def test_a_blank_glued_to_the_first_word_does_not_cost_it():
    words = "▁[INST] ▁Hi ▁[/INST] ▁Hello ▁world ▁"
    tokenizer = word_tokenizer(words, metaspace=True, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = MISTRAL
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello world"}]
    encoded = ChatEncoder(TextTokenizer(tokenizer), "messages", False).encode([Row({"messages": messages}, "x")])
    trained = tokenizer.convert_ids_to_tokens(encoded.tokens[encoded.mask == 1].tolist())
    assert trained == ["▁Hello", "▁world", "</s>"]


def test_a_token_over_the_edge_is_not_trained_on():
    text = "ask\n\nanswer!"
    offsets = [(0, 3), (3, 5), (5, 11), (11, 12)]
    assert chat_masks.token_mask(text, offsets, [(4, 12)]) == [0, 0, 1, 1]  # the two newlines are one token, half of it prompt
    assert chat_masks.token_mask("a: yes", [(0, 1), (1, 2), (2, 6)], [(3, 6)]) == [0, 0, 1]  # only a blank is outside
    assert chat_masks.token_mask("end<e>\nuser", [(0, 3), (3, 7), (7, 11)], [(0, 6)]) == [1, 1, 0]  # an end token with its newline


def prompt_encoder(tokenizer, **options):
    text_tokenizer = TextTokenizer(tokenizer)
    special = special_tokens(tokenizer, None, None)
    return PromptEncoder(text_tokenizer, special, "prompt", "completion", options.get("train_on_prompt", False))


def test_only_completions_are_trained_on():
    tokenizer = byte_tokenizer()
    rows = [Row({"prompt": "2+2=", "completion": "4"}, "a"), Row({"prompt": "x", "completion": " "}, "b")]
    encoded = prompt_encoder(tokenizer).encode(rows)
    assert tokenizer.decode(encoded.tokens.tolist()) == "2+2=4</s>"
    assert encoded.mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert dict(encoded.dropped) == {"rows with an empty completion": 1}
    assert prompt_encoder(tokenizer, train_on_prompt=True).encode(rows).mask.tolist() == [1] * 6


def test_completions_of_a_tokenizer_that_puts_blanks_before_texts():
    tokenizer = word_tokenizer("▁Say ▁hello ▁now ▁", metaspace=True, eos_token="</s>")
    encoded = prompt_encoder(tokenizer).encode([Row({"prompt": "Say ", "completion": "hello now"}, "a")])
    assert tokenizer.convert_ids_to_tokens(encoded.tokens.tolist()) == ["▁Say", "▁hello", "▁now", "</s>"]
    assert encoded.mask.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("columns", "asked", "kind", "chosen"),
    [
        ({"text": "a", "id": "3"}, {}, "text", ("text",)),
        ({"body": "a", "id": 3}, {}, "text", ("body",)),
        ({"messages": [], "text": "a"}, {}, "chat", ("messages",)),
        ({"conversations": []}, {}, "chat", ("conversations",)),
        ({"prompt": "a", "completion": "b"}, {}, "prompt", ("prompt", "completion")),
        ({"q": "a", "a": "b"}, {"prompt_column": "q", "completion_column": "a"}, "prompt", ("q", "a")),
        ({"messages": [], "text": "a"}, {"text_column": "text"}, "text", ("text",)),
    ],
)
def test_what_is_trained_on_follows_from_the_columns(columns, asked, kind, chosen):
    names = dict.fromkeys(["text_column", "prompt_column", "completion_column", "messages_column"]) | asked
    objective = choose_objective(Row(columns, "a.jsonl, line 1"), **names)
    assert (objective.kind, objective.columns) == (kind, chosen)


@pytest.mark.parametrize(
    ("columns", "asked", "message"),
    [
        ({"a": "x", "b": "y"}, {}, "name one of a, b"),
        ({"a": "x", "b": "y"}, {"text_column": "c"}, "there are a, b"),
        ({"prompt": "x"}, {"prompt_column": "prompt"}, "there is no column 'completion'"),
        ({"text": "x", "messages": []}, {"text_column": "text", "messages_column": "messages"}, "were given together"),
    ],
)
def test_columns_that_do_not_fit_are_listed(columns, asked, message):
    names = dict.fromkeys(["text_column", "prompt_column", "completion_column", "messages_column"]) | asked
    with pytest.raises(UserError, match=message):
        choose_objective(Row(columns, "a.jsonl, line 1"), **names)
