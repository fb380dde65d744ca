"""What is measured: the steps that count, the rows as they are known, and what has no room."""

import jax
import jax.numpy as jnp
import pytest

from dsv41_jax import measure
from dsv41_jax.measure import StepClock, measure_context


@pytest.fixture
def time_of():
    """A clock that shows what its last entry says."""
    return [0.0]


@pytest.fixture
def clock(time_of):
    made = StepClock(lambda: time_of[-1])
    yield made
    made.close()


def test_the_speed_counts_the_steps_that_compiled_nothing(clock, time_of):
    twice = jax.jit(lambda x: 2 * x)
    for seconds, tokens, width in ((50, 1, 3), (20, 4, 5), (1, 2, None), (30, 3, 7), (1, 4, None), (1, 3, None)):
        if width is not None:
            twice(jnp.zeros(width)).block_until_ready()  # a new shape: compiles, within the step
        time_of.append(time_of[-1] + seconds)
        clock.step(tokens)
    assert clock.steps == [(2, 1.0), (4, 1.0), (3, 1.0)]  # by hand: not the prefill, nor the two new widths
    assert clock.rate == 3.0


def test_a_speed_of_no_steps_is_none(clock):
    assert clock.rate is None
    clock.step(1)
    assert clock.rate is None


def test_a_slow_step_does_not_move_the_median(clock, time_of):
    for seconds in (0, 1, 1, 1, 100):
        time_of.append(time_of[-1] + seconds)
        clock.step(1)
    assert clock.rate == 1.0


def test_a_closed_clock_hears_nothing(time_of):
    clock = StepClock(lambda: time_of[-1])
    clock.close()
    jax.jit(lambda x: 3 * x)(jnp.zeros(11)).block_until_ready()
    clock.step(1)
    clock.step(1)
    assert clock.steps == [(1, 0.0)]


def test_a_cache_larger_than_the_memory_is_refused_before_it_is_made(small, monkeypatch):
    monkeypatch.setattr(measure, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(type(small), "init_cache", lambda *_: pytest.fail("a cache was made"))
    with pytest.raises(ValueError, match=r"^tokens: the cache of 1064 takes [\d,]+ bytes, the device has 1,000$"):
        measure_context(small, 1000, 64)


def test_phases_of_a_measurement_are_told_as_they_begin(small):
    told = []
    cost = measure_context(small, 4, 1, on_phase=told.append)
    assert told == ["compiling", "prefill", "decoding"]
    assert cost.tokens == 4
