import json

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from unmask.training.run_log import Means

measured = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-9, 9), st.integers(0, 3)))


@given(measured, measured, st.sets(st.sampled_from("abc")))
def test_a_mean_is_of_all_since_it_was_last_taken_and_goes_on_from_what_was_kept(before, after, due):
    earlier, means = Means(), Means()
    for name, value, count in before:
        earlier.add(name, value * count, count)
    means.add("of another run", 1, 1)
    means.load(json.loads(json.dumps(earlier.state())))
    for name, value, count in after:
        means.add(name, value * count, count)
    values = {name: [value for key, value, count in before + after for _ in range(count) if key == name] for name in "abc"}
    expected = {name: approx(sum(values[name]) / len(values[name])) for name in "abc" if values[name]}
    assert means.state_everywhere() == means.state()  # of one process
    assert means.take(due.__contains__) == {name: mean for name, mean in expected.items() if name in due}
    assert means.take(lambda name: True) == {name: mean for name, mean in expected.items() if name not in due}
    assert means.take(lambda name: True) == {}
