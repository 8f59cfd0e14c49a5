"""Conversations of files and data sets, and which of their tokens are learnt."""

import dataclasses
import json
import re
import sys
from types import SimpleNamespace

import pytest

from specjax import load_target
from specjax.api import encode_prompts
from specjax.data.conversations import (
    Conversation,
    encode_answers,
    encode_conversations,
    parse_conversation,
    read_conversation_dataset,
    read_conversation_files,
)
from tests.evaluation.tiny_target import STOP, tiny_target

# Ends answers with a token and every turn with a line, as ChatML does.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Shows reasoning in an answer that nothing follows, and only there, as Qwen3's does.
REASONING = TEMPLATE.replace(
    "]{{ m.content }}", "]{% if m.role == 'assistant' and loop.last %}<>{% endif %}{{ m.content }}"
)
CHAT = [("system", "be"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2")]


def messages(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def conversation(*pairs, source="file"):
    return Conversation(messages(pairs), source, f"{source}, line 1")


def with_template(template):
    target = tiny_target()
    target.tokenizer.chat_template = template
    return target


def learnt(target, sequence):
    """The text of each run of learnt tokens, and the whole text."""
    runs, run = [], []
    for token, is_learnt in zip(*sequence, strict=True):
        if is_learnt:
            run.append(token)
        elif run:
            runs, run = [*runs, run], []
    runs = [*runs, run] if run else runs
    decode = target.tokenizer.decode
    return [decode(run) for run in runs], decode(sequence.tokens_T)


FORMS = [
    ({"messages": messages(CHAT)}, CHAT),
    (
        {
            "conversations": [
                {"from": "system", "value": "be"},
                {"from": "human", "value": "u"},
                {"from": "gpt", "value": "a"},
            ]
        },
        [("system", "be"), ("user", "u"), ("assistant", "a")],
    ),
    ({"turns": ["first", "second"]}, [("user", "first")]),
    ({"prompt": "p", "id": 3}, [("user", "p")]),
    ({"prompt": "p", "response": "r"}, [("user", "p"), ("assistant", "r")]),
    ({"prompt": "p", "completion": ""}, [("user", "p"), ("assistant", "")]),
    ({"prompt": "title", "messages": messages(CHAT[1:3])}, CHAT[1:3]),
    # As a data set gives records of several forms: with every key of any.
    (
        {
            "prompt": None,
            "response": None,
            "messages": [{"role": None, "content": None, "from": "human", "value": ""}],
        },
        [("user", "")],
    ),
    # Cut out of a longer conversation.
    ({"messages": messages([CHAT[0], CHAT[2], *CHAT[3:]])}, [CHAT[0], *CHAT[3:]]),
]


@pytest.mark.parametrize(("record", "expected"), FORMS)
def test_forms_of_records(record, expected):
    assert parse_conversation(record, "f", "w") == (messages(expected), "f", "w")


def test_prompts_are_what_comes_before_the_answer():
    answered = conversation(*CHAT)
    assert answered.answered
    assert answered.prompt == messages(CHAT[:4])
    asked = conversation(*CHAT[:4])
    assert not asked.answered
    assert asked.prompt == messages(CHAT[:4])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (["x"], 'line 2: expected {"messages"'),
        ({"text": "x"}, 'line 2: expected {"messages"'),
        ({"turns": []}, 'line 2: expected {"turns"'),
        ({"messages": "x"}, 'line 2: expected a list of {"role"'),
        ({"messages": ["x"]}, 'line 2: expected a list of {"role"'),
        ({"messages": []}, "line 2: expected at least one message of the user"),
        ({"messages": messages([CHAT[2]])}, "line 2: expected at least one message of the user"),
        (
            {"messages": messages([CHAT[1], ("tool", "x")])},
            "line 2, message 2: expected the role system, user, human, assistant, gpt, got 'tool'",
        ),
        ({"messages": [{"content": "x"}]}, "line 2, message 1: expected the role"),
        (
            {"messages": messages([("user", None)])},
            "line 2, message 1: expected text, got NoneType",
        ),
        ({"prompt": ["x"]}, "line 2, message 1: expected text, got list"),
        ({"prompt": "x", "response": "a", "completion": "b"}, "line 2: expected one of"),
        (
            {"prompt": "x", "response": "a \ud800"},
            "line 2, message 2: the text holds half of a surrogate pair",
        ),
    ],
)
def test_bad_records_are_named(tmp_path, record, message):
    path = tmp_path / "c.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{json.dumps(record)}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        list(read_conversation_files(str(path)))


def test_files_are_read_in_order(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "3"}')
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n\n{"turns": ["2"]}\n')
    found = list(read_conversation_files(f"{tmp_path}/*.jsonl"))
    assert [each.prompt[0]["content"] for each in found] == ["1", "2", "3"]
    assert [each.source for each in found] == [str(tmp_path / f"{n}.jsonl") for n in "aab"]
    assert found[1].where == f"{tmp_path / 'a.jsonl'}, line 3"


def test_files_without_conversations_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no conversations"):
        list(read_conversation_files(f"{tmp_path}/*.jsonl"))


# Data sets


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


@pytest.fixture
def folder(tmp_path):
    """Of one data file, with records of several forms."""
    folder = tmp_path / "folder"
    folder.mkdir()
    records = [record for record, _ in FORMS[:6]]
    lines = [json.dumps(record) for record in records]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def check_rows(found, name):
    assert [each.messages for each in found] == [messages(pairs) for _, pairs in FORMS[:6]]
    assert [each.where for each in found] == [f"{name}, row {i}" for i in range(6)]


def test_folders_of_data_files(datasets, folder):
    check_rows(list(read_conversation_dataset(str(folder))), folder)
    with pytest.raises(ValueError, match=r"cannot load the data set .*Unknown split .test"):
        read_conversation_dataset(str(folder), split="test")


@pytest.mark.parametrize("with_splits", [False, True])
def test_saved_data_sets(datasets, folder, tmp_path, with_splits):
    rows = datasets.load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    saved = datasets.DatasetDict(train=rows, held=rows.select([0])) if with_splits else rows
    saved.save_to_disk(tmp_path / "saved")
    name = str(tmp_path / "saved")
    check_rows(list(read_conversation_dataset(name)), name)
    if with_splits:
        assert len(list(read_conversation_dataset(name, split="held"))) == 1
        with pytest.raises(ValueError, match="has no split 'test': it has train, held"):
            read_conversation_dataset(name, split="test")


def test_damaged_data_files(datasets, folder):
    (folder / "train.jsonl").write_text('{"prompt": [1')
    with pytest.raises(ValueError, match="cannot load the data set"):
        read_conversation_dataset(str(folder))


def fake_package(monkeypatch, load_dataset):
    exceptions = SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
    package = SimpleNamespace(load_dataset=load_dataset, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return package


def test_data_sets_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [{"prompt": "p"}, {"text": "t"}]

    fake_package(monkeypatch, load_dataset)
    found = read_conversation_dataset("some/chats", subset="small", split="train[:2]")
    assert next(found) == conversation(("user", "p"))._replace(
        source="some/chats", where="some/chats, row 0"
    )
    assert asked == [(("some/chats", "small"), {"split": "train[:2]"})]
    with pytest.raises(ValueError, match="some/chats, row 1: expected"):
        next(found)


@pytest.mark.parametrize("kind", [ConnectionError, ValueError, "DatasetsError"])
def test_data_sets_that_cannot_be_loaded(monkeypatch, kind):
    def load_dataset(*args, **kwargs):
        raise (getattr(package.exceptions, kind) if isinstance(kind, str) else kind)("no way")

    package = fake_package(monkeypatch, load_dataset)
    with pytest.raises(ValueError, match="cannot load the data set 'some/chats': no way"):
        read_conversation_dataset("some/chats")


def test_empty_data_sets_are_refused(monkeypatch):
    fake_package(monkeypatch, lambda *args, **kwargs: [])
    with pytest.raises(ValueError, match="some/chats holds no conversations"):
        list(read_conversation_dataset("some/chats"))


def test_the_package_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets: pip install 'specjax\["):
        read_conversation_dataset("some/chats")


# Tokens


def test_answers_and_what_ends_them_are_learnt():
    target = with_template(TEMPLATE)
    [sequence] = encode_answers(target, conversation(*CHAT, ("user", "u3")))
    runs, text = learnt(target, sequence)
    assert runs == ["a1<end>", "a2<end>"]
    assert text == "[system]be\n[user]u1\n[assistant]a1<end>\n[user]u2\n[assistant]a2<end>\n"
    first = int(sequence.loss_mask_T.argmax())
    [prompt] = encode_prompts(target, [messages(CHAT[:2])])
    assert sequence.tokens_T[:first].tolist() == prompt
    assert sequence.tokens_T[first + 2] == STOP


def test_spaces_before_an_answer_are_left_out():
    target = with_template(TEMPLATE)
    [sequence] = encode_answers(target, conversation(("user", " u"), ("assistant", "\n a \n")))
    assert learnt(target, sequence) == (["a \n<end>"], "[user] u\n[assistant]a \n<end>\n")


def test_nothing_is_learnt_after_what_ends_a_turn():
    target = with_template(TEMPLATE)
    [sequence] = encode_answers(target, conversation(("user", "u"), ("assistant", "a<end>b")))
    assert learnt(target, sequence)[0] == ["a<end>"]


def test_answers_that_no_token_ends_are_learnt_whole():
    target = with_template(TEMPLATE.replace("<end>", "."))
    [sequence] = encode_answers(target, conversation(*CHAT[:4], ("assistant", "")))
    assert learnt(target, sequence)[0] == ["a1.\n", ".\n"]


def test_an_answer_that_is_shown_otherwise_later_has_its_own_sequence():
    target = with_template(REASONING)
    sequences = list(encode_answers(target, conversation(*CHAT[1:])))
    assert [learnt(target, each) for each in sequences] == [
        (["<>a1<end>"], "[user]u1\n[assistant]<>a1<end>\n"),
        (["<>a2<end>"], "[user]u1\n[assistant]a1<end>\n[user]u2\n[assistant]<>a2<end>\n"),
    ]


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.replace("%}[assistant]{%", "%}[assistant]<>{%"),  # nowhere else
        "{% for m in messages %}{{ m.content }}{% endfor %}:",  # with or without being asked
        "[{{ messages | length }}]" + TEMPLATE,
    ],
)
def test_templates_that_change_what_comes_before_an_answer_are_refused(template):
    with pytest.raises(ValueError, match=r"file, line 1, message 3: .* of tiny the tokens before"):
        list(encode_answers(with_template(template), conversation(*CHAT)))


def test_conversations_that_the_template_refuses():
    target = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"file, line 1: .* of tiny refuses it: roles must alt"):
        list(encode_answers(target, conversation(*CHAT)))


def test_targets_without_a_chat_template_are_refused():
    with pytest.raises(ValueError, match="tiny has no tokeniser with a chat template"):
        list(encode_answers(with_template(None), conversation(*CHAT)))
    target = dataclasses.replace(tiny_target(), tokenizer=None)
    with pytest.raises(ValueError, match="tiny has no tokeniser with a chat template"):
        list(encode_answers(target, conversation(*CHAT)))


def test_conversations_without_answers_are_left_out_unless_a_file_has_no_others():
    target = with_template(TEMPLATE)
    asked, answered = conversation(*CHAT[:2]), conversation(*CHAT[:3])
    [sequence] = encode_conversations(target, [asked, answered, asked])
    assert learnt(target, sequence)[0] == ["a1<end>"]
    others = [asked._replace(source="other"), answered._replace(source="last")]
    with pytest.raises(ValueError, match="other holds no answer to learn from"):
        list(encode_conversations(target, [answered, *others]))
    with pytest.raises(ValueError, match="other holds no answer to learn from"):
        list(encode_conversations(target, [answered, others[0]]))


@pytest.mark.slow
def test_smollm2(smollm2_gguf):
    del smollm2_gguf  # only to skip without it
    target = load_target("smollm2-135m")
    pairs = [("user", "Hi"), ("assistant", "Hello!"), ("user", "2+2?"), ("assistant", " 4.\n\n")]
    [sequence] = encode_answers(target, conversation(*pairs))
    runs, text = learnt(target, sequence)
    assert runs == ["Hello!<|im_end|>", "4.\n\n<|im_end|>"]
    pairs[-1] = ("assistant", "4.\n\n")
    assert text == target.tokenizer.apply_chat_template(messages(pairs), tokenize=False)
