"""Text that the target writes, and the hidden states it had while writing."""

import dataclasses

import numpy as np
import pytest

import specjax
from specjax.api import encode_prompts
from specjax.data.self_generated import Writing, user_prefix, write_answers, write_user_turns
from tests.evaluation.tiny_target import STOP, tiny_target
from tests.toys import MarkovTarget

WRITING = Writing(batch_size=3, user_tokens=6, answer_tokens=20, min_answer_tokens=5, seed=2)
TURNS = ["ab", "hello there", "x"]


@pytest.fixture(scope="module")
def target():
    target = tiny_target()
    target.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}:"
    )
    return target


@pytest.fixture(scope="module")
def answers(target):
    return write_answers(target, TURNS, (-1,), WRITING, batch=0)


def test_hidden_states_are_those_of_a_pass_over_the_text(target, answers):
    assert len(answers) == 3
    for sample, turn in zip(answers, TURNS, strict=True):
        out = target.forward(sample.tokens_T[None], taps=(-1,))
        live = len(sample.tokens_T) - 1
        close = {"rtol": 1e-2, "atol": 1e-2}  # kept in bfloat16
        got = sample.taps_TMD[:live].astype(np.float32)
        np.testing.assert_allclose(got, out.taps[0, :live], **close)
        got = sample.hidden_TD[:live].astype(np.float32)
        np.testing.assert_allclose(got, out.hidden[0, :live], **close)
        assert not sample.hidden_TD[live:].any()
        [prompt] = encode_prompts(target, [turn])
        assert sample.tokens_T[: len(prompt)].tolist() == prompt
        assert sample.loss_mask_T.tolist() == [False] * len(prompt) + [True] * (
            len(sample.tokens_T) - len(prompt)
        )


def test_greedy_answers_are_what_generate_gives(target, answers):
    """Temperatures take turns: the first and the third row are greedy."""
    result = specjax.generate(target, None, TURNS, max_new_tokens=20)
    for row in (0, 2):
        prompt = int(np.argmax(answers[row].loss_mask_T))
        got = answers[row].tokens_T[prompt:].tolist()
        assert [token for token in got if token != STOP] == result.tokens[row]
    prompt = int(np.argmax(answers[1].loss_mask_T))
    assert answers[1].tokens_T[prompt:].tolist() != result.tokens[1]


def test_a_batch_is_the_same_whenever_it_is_written(target, answers):
    again = write_answers(target, TURNS, (-1,), WRITING, batch=0)
    for left, right in zip(answers, again, strict=True):
        np.testing.assert_array_equal(left.tokens_T, right.tokens_T)
    other = write_answers(target, TURNS, (-1,), WRITING, batch=2)
    assert other[1].tokens_T.tolist() != answers[1].tokens_T.tolist()
    assert len(write_answers(target, TURNS[:1], (-1,), WRITING, batch=0)) == 1
    assert write_answers(target, [], (-1,), WRITING, batch=0) == []


def test_short_answers_are_left_out(target):
    stops = tuple(range(257))
    short = dataclasses.replace(target, stop_ids=stops)  # every answer is one token
    assert write_answers(short, TURNS, (-1,), WRITING, batch=0) == []


def test_user_turns_are_sampled_from_the_template(target):
    turns = write_user_turns(target, WRITING, 0)
    assert turns == write_user_turns(target, WRITING, 0)
    assert turns != write_user_turns(target, WRITING, 1)
    assert 0 < len(turns) <= 3
    assert target.tokenizer.decode(user_prefix(target)) == "[user]"


def test_user_turns_begin_with_openings_in_turn(target):
    writing = dataclasses.replace(WRITING, user_openings=("Sum", "Do"), temperatures=(0.0,))
    for batch, starts in enumerate((["Sum", "Do", "Sum"], ["Do", "Sum", "Do"])):
        turns = write_user_turns(target, writing, batch)
        assert [turn[: len(start)] for turn, start in zip(turns, starts, strict=True)] == starts
        assert any(len(turn) > 3 for turn in turns)


def test_openings_and_temperatures_meet_in_all_pairs():
    Writing(user_openings=("a", "b", "c"), temperatures=(0.0, 0.8))
    with pytest.raises(ValueError, match="without a common divisor"):
        Writing(user_openings=("a", "b"), temperatures=(0.0, 0.8))


def test_targets_that_cannot_write_are_refused(target):
    with pytest.raises(ValueError, match="no tokeniser with a chat template"):
        user_prefix(dataclasses.replace(target, tokenizer=None))
    foreign = dataclasses.replace(target, model=MarkovTarget(5))
    with pytest.raises(ValueError, match="gives no hidden states"):
        write_answers(foreign, [[1]], (0,), WRITING, 0)


def test_prompts_without_room_for_an_answer_are_left_out(target):
    long = [[1] * target.model.max_len]
    assert write_answers(target, long, (-1,), WRITING, batch=0) == []
    assert len(write_answers(target, [*long, "ab"], (-1,), WRITING, batch=0)) == 1


def test_processors_act_on_answers(target):
    greedy = dataclasses.replace(WRITING, temperatures=(0.0,))
    likeliest = dataclasses.replace(WRITING, temperatures=(0.9,), top_k=1)
    pairs = zip(
        *(write_answers(target, TURNS, (-1,), how, batch=0) for how in (greedy, likeliest)),
        strict=True,
    )
    for left, right in pairs:
        np.testing.assert_array_equal(left.tokens_T, right.tokens_T)


def test_processors_go_to_the_sampling():
    values = {
        "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "frequency_penalty": 0.3, "presence_penalty": 0.4,
    }  # fmt: skip
    sampling = Writing(**values).sampling(0.5, 7)
    assert {name: getattr(sampling, f"{name}_B") for name in values} == values
    assert (sampling.temperature_B, sampling.seed_B) == (0.5, 7)


def test_impossible_temperatures_are_refused():
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        Writing(temperatures=(0.0, -1.0))


@pytest.mark.parametrize("template", ["{{ messages[0].content }}:", "[user]:"])
def test_templates_without_a_place_for_the_user_are_refused(template):
    target = tiny_target()
    target.tokenizer.chat_template = template
    with pytest.raises(ValueError, match="nothing stands before the user's message"):
        user_prefix(target)


@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 0}, {"answer_tokens": 0}, {"temperatures": ()}, {"user_openings": ()}],
)
def test_wrong_settings_are_refused(changes):
    with pytest.raises(ValueError, match="must be at least 1"):
        Writing(**changes)


def test_answers_that_would_all_be_dropped_are_refused():
    with pytest.raises(ValueError, match="no answer of at most 10 tokens"):
        Writing(answer_tokens=10, min_answer_tokens=11)
