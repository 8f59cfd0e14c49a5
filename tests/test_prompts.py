import re
from pathlib import Path

import pytest

from specjax.data.prompts import BUILTIN, builtin_prompt, find_prompt_files, read_prompts


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_first_turns_in_order(tmp_path):
    text = '{"turns": ["first é", "second"]}\n\n{"turns": ["a\\u2028b"], "id": 3}\n{"turns": [""]}'
    assert read_prompts(write(tmp_path / "p.jsonl", text)) == ["first é", "a\u2028b", ""]
    assert read_prompts(tmp_path / "p.jsonl", limit=2) == ["first é", "a\u2028b"]


def test_a_byte_order_mark_is_skipped(tmp_path):
    assert read_prompts(write(tmp_path / "p.jsonl", '\ufeff{"turns": ["a"]}')) == ["a"]


def test_line_separators_inside_a_string_do_not_end_the_line(tmp_path):
    path = write(tmp_path / "p.jsonl", '{"turns": ["a\u2028b"]}\r\n')
    assert read_prompts(path) == ["a\u2028b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["x"]', "line 2: not valid JSON"),
        ('{"prompt": "x"}', 'line 2: expected {"turns": ["the prompt", ...]}'),
        ('{"turns": []}', "line 2: expected"),
        ('{"turns": "x"}', "line 2: expected"),
        ('{"turns": [3]}', "line 2: expected"),
        ('["x"]', "line 2: expected"),
        ('{"turns": ["a \\ud800"]}', "line 2: the text holds half of a surrogate pair"),
        ('{"turns": ' * 100_000, "line 2: not valid JSON"),
        (f'{{"turns": ["x"], "id": {"1" * 5000}}}', "line 2: not valid JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path / "p.jsonl", f'{{"turns": ["x"]}}\n{line}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        read_prompts(path)


def test_files_without_prompts(tmp_path):
    path = write(tmp_path / "empty.jsonl", "\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        read_prompts(path)
    with pytest.raises(ValueError, match=r"cannot read the prompt file .*missing\.jsonl"):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe9"]}')
    with pytest.raises(ValueError, match=r"cannot read the prompt file .*latin\.jsonl"):
        read_prompts(tmp_path / "latin.jsonl")


def test_negative_limit(tmp_path):
    with pytest.raises(ValueError, match="limit must be at least 0"):
        read_prompts(write(tmp_path / "p.jsonl", '{"turns": ["x"]}'), limit=-1)


def test_globs_give_sorted_unique_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "folder.jsonl/d.jsonl"):
        write(tmp_path / name, "")
    assert list(find_prompt_files(f"{tmp_path}/*.jsonl")) == ["a", "b"]
    assert list(find_prompt_files(f"{tmp_path}/**/*.jsonl")) == ["a", "b", "c", "d"]
    write(tmp_path / "deep/a.jsonl", "")
    names = list(find_prompt_files(f"{tmp_path}/**/a.jsonl"))
    assert names == [str(tmp_path / "a.jsonl"), str(tmp_path / "deep/a.jsonl")]


def test_globs_that_match_nothing(tmp_path):
    with pytest.raises(ValueError, match="no prompt file matches"):
        find_prompt_files(f"{tmp_path}/*.jsonl")
    with pytest.raises(ValueError, match="no prompt file matches"):
        find_prompt_files("~nosuchuser/*.jsonl")
    with pytest.raises(ValueError, match=r"set config\.prompts to a glob"):
        find_prompt_files("")


def test_file_names_that_are_not_utf8(tmp_path):
    write(Path(f"{tmp_path}/caf\udce9.jsonl"), "")  # Latin-1
    with pytest.raises(ValueError, match=r"the file name .* is not UTF-8: rename"):
        find_prompt_files(f"{tmp_path}/*.jsonl")


def test_builtin_prompts():
    assert BUILTIN.keys() == {"mathematics", "code", "chat", "rewrite"}
    assert builtin_prompt("chat") == BUILTIN["chat"]
    with pytest.raises(ValueError, match="unknown built-in prompt 'math': known are mathematics"):
        builtin_prompt("math")
