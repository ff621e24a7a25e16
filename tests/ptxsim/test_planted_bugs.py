"""Every bug planted in a test kernel is caught, or argued to be none (planted_bugs.EQUIVALENT)."""

import re

import pytest

from ptxsim import planted_bugs

SUBJECTS = {subject.name: subject for subject in planted_bugs.subjects()}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_planted_bug_is_caught_or_argued(name):
    subject = SUBJECTS[name]
    for seed in planted_bugs.SEEDS:
        subject.run(subject.text, seed)
    verdicts = list(planted_bugs.judge(subject))
    missed = [f"{v.family}: {v.mutant}" for v in verdicts if v.caught_by is None and v.why is None]
    assert not missed, f"{name}: {len(missed)} of {len(verdicts)} planted bugs were missed:\n" + "\n".join(missed)
    unused = [
        pattern
        for who, pattern, _ in planted_bugs.EQUIVALENT
        if re.fullmatch(who, name) and not any(v.caught_by is None and re.search(pattern, v.mutant) for v in verdicts)
    ]
    assert not unused, f"{name}: argued as equivalent, but caught or never planted: {unused}"


def test_a_missed_bug_is_not_passed_over(monkeypatch):
    """The table has to fail if the simulator goes blind."""
    name = next(n for n in SUBJECTS if "tree_reduction" in n)
    blind = SUBJECTS[name].run
    monkeypatch.setattr(planted_bugs, "_outcome", lambda *args: None)
    verdicts = list(planted_bugs.judge(SUBJECTS[name]))
    assert verdicts
    assert any(v.why is None for v in verdicts)
    assert blind is SUBJECTS[name].run
