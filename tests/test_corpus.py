"""Corpora of plain text: files, tokenisers and packing."""

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from specjax.data.corpus import (
    END,
    begin_token,
    find_documents,
    pack,
    read_documents,
    single_rows,
    train_tokenizer,
)
from specjax.data.target_cache import TokenSequence


def test_rows_hold_the_documents_in_order():
    documents = [[1, 2, 3], [], [4, 5], [6] * 9]
    rows = list(pack(documents, end=0, length=5))
    assert [row.tokens_T.tolist() for row in rows] == [
        [1, 2, 3, 0, 0],
        [4, 5, 0, 6, 6],
        [6, 6, 6, 6, 6],
        [6, 6, 0, 0, 0],
    ]
    assert [row.segments_T.tolist() for row in rows] == [
        [1, 1, 1, 1, 2],
        [1, 1, 1, 2, 2],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0],
    ]
    assert [row.positions_T.tolist() for row in rows] == [
        [0, 1, 2, 3, 0],
        [0, 1, 2, 0, 1],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 0, 0],
    ]
    assert [row.loss_mask_T.tolist() for row in rows] == [[True] * 5] * 3 + [
        [True] * 3 + [False] * 2
    ]
    assert list(pack([], end=0, length=5)) == []


def test_every_part_of_a_document_can_begin_with_a_token():
    rows = list(pack([[1, 2, 3], [4], [5, 6]], end=0, length=4, begin=9))
    assert [row.tokens_T.tolist() for row in rows] == [
        [9, 1, 2, 3],
        [9, 0, 9, 4],
        [9, 0, 9, 5],
        [9, 6, 0, 0],
    ]
    assert [row.segments_T.tolist() for row in rows] == [
        [1, 1, 1, 1],
        [1, 1, 2, 2],
        [1, 1, 2, 2],
        [1, 1, 1, 0],
    ]
    assert rows[1].positions_T.tolist() == [0, 1, 0, 1]
    # A place that has no room for both is left out.
    (first, second) = pack([[1], [2]], end=0, length=4, begin=9)
    assert first.tokens_T.tolist() == [9, 1, 0, 0]
    assert first.loss_mask_T.tolist() == [True, True, True, False]
    assert second.tokens_T.tolist() == [9, 2, 0, 0]
    with pytest.raises(ValueError, match="rows of 1 tokens hold no text"):
        list(pack([[1]], end=0, length=1, begin=9))


def test_tokenizers_tell_whether_texts_begin_with_a_token():
    tokenizer = train_tokenizer(["a b c"], 300)
    assert begin_token(tokenizer) is None
    tokenizer.bos_token = END
    assert begin_token(tokenizer) is None  # it has one, and does not put it there
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.bos_token_id)]
    )
    assert begin_token(tokenizer) == tokenizer.bos_token_id


def test_texts_may_have_rows_of_their_own():
    text = TokenSequence(np.array([4, 5, 6], np.int32), np.array([False, True, True]))
    (row,) = single_rows([text])
    assert row.tokens_T.tolist() == [4, 5, 6]
    assert row.loss_mask_T.tolist() == [False, True, True]
    assert row.segments_T.tolist() == [1, 1, 1]
    assert row.positions_T.tolist() == [0, 1, 2]


def test_a_trained_tokenizer_gives_texts_back():
    text = "def f(x):\n    return x + 1  # naïve, 日本 \U0001f600\n" * 20
    tokenizer = train_tokenizer([text], 300)
    assert len(tokenizer) <= 300
    ids = tokenizer(text)["input_ids"]
    assert len(ids) < len(text.encode()) / 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == END
    assert tokenizer.mask_token_id not in ids
    with pytest.raises(ValueError, match="at least 258"):
        train_tokenizer([text], 257)


def test_documents_of_files(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    files = find_documents(f"{tmp_path}/*.txt")
    assert list(read_documents(files)) == ["first", "second"]
    with pytest.raises(ValueError, match="no file matches"):
        find_documents(f"{tmp_path}/*.md")
    with pytest.raises(ValueError, match=r"give its files \(.*/\*\*/\*\)"):
        find_documents(str(tmp_path))


def test_any_machine_has_a_corpus():
    files = find_documents("")
    names = {file.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any("site-packages" in file.parts for file in files)
    assert np.mean([file.stat().st_size for file in files]) > 1000
