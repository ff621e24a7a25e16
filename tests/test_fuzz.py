"""`make fuzz`: what it once found stays found, each of its places runs, and it sees what is planted."""

import itertools
import json

import pytest

import attnkern
import fuzz

KEPT = [json.loads(line) for line in fuzz.FOUND.read_text().splitlines()]
CPU = [place for place in fuzz.places() if place.startswith("cpu-")]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: f"{kept['place']}-{kept['seed']}")
def test_what_it_found(kept):
    """The seed says where it came from; the problem itself is kept. (tests/test_isa.py forces instruction sets.)"""
    place = "cpu" if kept["place"].startswith("cpu") else kept["place"]
    fuzz.Problem(**{name: x for name, x in kept.items() if name != "seed"} | {"place": place}).check()


@pytest.mark.parametrize("place", fuzz.places())
def test_every_place_runs(place, capfd):
    """Some problems of a fixed seed, in a process of their own."""
    assert fuzz.watch(place, 0, 0.5) == []
    told = capfd.readouterr().out
    assert told.startswith(place)
    assert int(told.split()[1]) >= 1


def test_a_seed_is_one_problem():
    for place in fuzz.places():
        assert fuzz.drawn(place, 3) == fuzz.drawn(place, 3)
    assert len({fuzz.drawn("cpu", seed).recipe for seed in range(20)}) == 20


def test_problems_reach_the_extremes():
    """Of 2000 seeds: what a kernel has to be right about comes often."""
    drawn = [fuzz.drawn("cpu", seed) for seed in range(2000)]
    said = [f"{problem.recipe} {problem.options}" for problem in drawn]

    def share(*parts):
        return sum(all(part in text for part in parts) for text in said) / len(said)

    assert share("'scale': -") > 0.1
    assert share("'scale': 0.0") > 0.05
    assert share("'scale': 0.0", "softcap") > 0.01
    assert share("seqlen_q=1,") > 0.05
    assert share("heads=0,") > 0.01
    assert share("product=-") > 0.05
    assert share("mask=('float'", "'window'") > 0.03
    assert share("with_ranges", "'window'") > 0.05
    assert share("with_ranges", "mask=('float'") > 0.02
    for kind in ("anything", "documents", "near", "few"):
        assert share(f"with_ranges('{kind}'") > 0.05
    for shape in itertools.product("B1", "H1", "L1"):
        for count, dtype in itertools.product((1, 2), ("int32", "int64")):
            assert share(f"{''.join(shape)!r}, {count}, torch.{dtype}") > 0.002
    assert sum(problem.huge for problem in drawn) > 100
    assert share("with_poison") > 0.2
    assert share("with_poison", "with_ranges") > 0.05
    assert share("with_poison", "mask=('bool'") > 0.03
    assert share(str(2**63)) > 0.005
    assert {problem.threads for problem in drawn} == set(fuzz.THREADS)
    packed = [problem.packed for problem in drawn if problem.packed is not None]
    assert len(packed) > 150
    assert sum(problem["used"] is not None and min(problem["used"]) < 0 for problem in packed) > 10
    paged = [problem for problem in drawn if problem.paged is not None]
    assert len(paged) > 200
    numbers = [[n for row in problem.paged["table"] for n in row] for problem in paged]
    assert {problem.paged["size"] for problem in paged} == {16, 32, 64, 128}
    assert sum(sorted(each) != each for each in numbers) > 80
    assert sum(len(set(each)) < len(each) for each in numbers) > 40
    assert sum(len(set(each)) < problem.paged["count"] for each, problem in zip(numbers, paged, strict=True)) > 100
    assert sum("with_ranges" in problem.recipe and "with_poison(nan)" in problem.recipe for problem in paged) > 100


def test_it_sees_a_wrong_page(monkeypatch):
    """Of problems with two pages of a sequence or more, where the backward order of them is another."""
    right = attnkern.attention

    def wrong(*tensors, **options):
        options["block_table"] = options["block_table"].flip(1).abs().clamp(max=tensors[1].shape[0] - 1)
        return right(*tensors, **options)

    drawn = (fuzz.drawn("cpu", seed) for seed in range(400))
    several = [problem for problem in drawn if problem.paged is not None and len(problem.paged["table"][0]) > 2]
    several = [problem for problem in several if "seqlen_q=0" not in problem.recipe and "heads=0" not in problem.recipe]
    for problem in several:
        problem.check()
    monkeypatch.setattr(attnkern, "attention", wrong)
    seen = 0
    for problem in several:
        try:
            problem.check()
        except AssertionError:
            seen += 1
    assert seen > 0.6 * len(several) > 10


def test_it_sees_a_wrong_number_and_keeps_the_problem(monkeypatch, capsys, tmp_path):
    """And prints the line that repeats it."""
    right = attnkern.attention

    def wrong(*tensors, **options):
        results = right(*tensors, **options)
        if options.get("scale") != 0.0 or not options.get("return_lse"):
            return results
        return results[0] * 1.01, results[1]

    monkeypatch.setattr(attnkern, "attention", wrong)
    fuzz.check("cpu", iter(range(400)), 60.0)
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert failed
    seed = int(failed[0].split()[-1])
    assert failed[0] == f"FAILED python -m fuzz --on cpu --seed {seed}"
    assert fuzz.drawn("cpu", seed).options["scale"] == 0.0
    monkeypatch.setattr(fuzz, "FOUND", tmp_path / "found.jsonl")
    monkeypatch.setattr(fuzz, "ROOT", tmp_path)
    problem = json.loads(json.dumps({**vars(fuzz.drawn("cpu", seed)), "seed": seed}))
    for _ in range(2):
        fuzz.keep([problem])
    assert [json.loads(line) for line in fuzz.FOUND.read_text().splitlines()] == [problem]


def test_a_process_that_dies_costs_the_problem_it_died_of(monkeypatch, capfd):
    """As a division by zero on the host does."""
    command = fuzz.command

    def dying(place, *rest):
        line, environment = command(place, *rest)
        code = "import os, signal, sys\nprint('begun: 41', flush=True)\nos.kill(os.getpid(), signal.SIGFPE)"
        return ([line[0], "-c", code] if rest[1] == "41" else line), environment

    monkeypatch.setattr(fuzz, "command", dying)
    failed = fuzz.watch(CPU[-1], 41, 6.0)
    assert [problem["seed"] for problem in failed] == [41]
    told = capfd.readouterr().out
    assert f"--on {CPU[-1]} --seed 41\n  the process ended with -8" in told
