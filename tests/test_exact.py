"""The identities of docs/exact.md, over all groups or responses of a small policy, and the other experiments."""

import json
import re
import subprocess
from itertools import product

import common
import exact
import grid
import pictures
import pytest
import seeds
import torch
from conftest import ROOT, SOURCES
from exact import RATES, Tree, float64, kl_slopes, make_args, make_rollout, moments, one_token, slopes
from PIL import Image
from test_siblings import commit


def test_raft_and_maxrl_ascend_the_same_truncated_log_of_the_pass_rate():
    for script in ("raft", "maxrl"):
        torch.testing.assert_close(moments(script, 5)[0], (1 - (1 - RATES) ** 4) / RATES)


def test_grpo_of_two_responses_is_rloo_up_to_a_factor_and_the_length():
    """For each response, it is smaller by sqrt 2, except for the 1e-4 beside the std, and divided by its length."""
    rollout = make_rollout([1, 0, 0, 0, 0, 1], lengths := torch.tensor([2, 5, 3, 3, 4, 1]))
    grpo, rloo = (slopes(x, make_args(x, samples_per_prompt=2), rollout, 6, 18) for x in ("grpo", "rloo"))
    torch.testing.assert_close(grpo * 2**0.5 * lengths[:, None], rloo, atol=0, rtol=1e-3)


def test_the_mean_squared_advantage_is_a_variance_of_the_scores():
    """With rloo.py, it is the variance within a prompt times k / (k - 1). With reinforce.py, all scores count."""
    torch.testing.assert_close(8 * moments("rloo", 8)[1], RATES * (1 - RATES) * 8 / 7)
    scores = torch.tensor([1.0, 0, 0, 1, 0], **float64)
    slope = slopes("reinforce", make_args("reinforce"), one_token(scores), 1, 5)
    torch.testing.assert_close(slope.square().mean(), scores.var(unbiased=False))


def test_k1_in_the_reward_has_the_gradient_of_the_kl_and_k2_and_k3_only_near_the_reference():
    tree, generator = Tree(3, 4), torch.Generator().manual_seed(0)
    ref, noise = tree.random(2, generator).split(1)
    for is_near in (True, False):
        leaf = (ref + noise * (1e-4 if is_near else 1.0)).requires_grad_()
        new, old = tree.logprobs(leaf)[0], tree.logprobs(ref)[0]
        (kl,) = torch.autograd.grad(tree.kl(leaf, ref).sum(), leaf)
        for term in ("k1 in the reward", "k2 in the loss", "k3 in the loss"):
            push = -kl_slopes(term, old, new.detach()) * new.detach().sum(1, keepdim=True).exp()
            (found,) = torch.autograd.grad((new * push).sum(), leaf, retain_graph=True)
            assert ((found - kl).norm() < 1e-3 * kl.norm()) == (is_near or "k1" in term), term


def test_an_experiment_measures_what_has_no_row_and_names_its_commit(tmp_path, monkeypatch):
    """The rows have the order of the cells. A commit is named as clean if only results differ from it."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "experiments" / "results")
    monkeypatch.setattr(common, "provenance", common.provenance.__wrapped__)  # without a cache
    common.RESULTS.mkdir(parents=True)
    for path in (tmp_path / "code.py", common.RESULTS / "mine.jsonl"):
        path.write_text("")
    commit(tmp_path)
    calls = []
    for cells in ([3], [1, 3], [2, 1, 3]):
        common.run_all("mine", [{"x": x} for x in cells], lambda _, x: calls.append(x) or {"y": x * x})
    rows = common.load("mine")
    assert calls == [3, 1, 2] and [(row["x"], row["y"]) for row in rows] == [(2, 4), (1, 1), (3, 9)]
    assert re.fullmatch("[0-9a-f]{7,}", rows[2]["commit"]) and rows[0].items() >= common.provenance().items()
    (tmp_path / "code.py").write_text("2\n")
    subprocess.run(["git", "add", "code.py"], cwd=tmp_path, check=True)
    common.run_all("mine", [{"x": 4}], lambda _, x: {"y": x * x})
    commits = [row["commit"] for row in common.load("mine")]
    assert commits == [f"{commits[1]}-dirty", *3 * [commits[1]]]


def test_changes_of_a_script_are_those_of_its_code():
    source = SOURCES["rloo"]
    lines = {"others = (groups": "others = +(groups", "view(-1, 1)  # (B, 1)": "view(-1, 1)  # (B,)"}
    for old, new in (lines | {'"""Return {"adv': '"""Give {"adv'}).items():
        assert source.count(old) == 1
        found = [common.code_of(x, "method") for x in (source, source.replace(old, new))]
        assert (found[0] != found[1]) == ("+" in new) and len(found[0]) > 10


def test_the_commits_of_rows_are_listed_with_the_scripts_that_have_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    common.save("mine", [dict.fromkeys(common.MADE, "HEAD")])
    common.print_changes()
    assert capsys.readouterr().out.startswith("HEAD: mine\n    changed since, estimator block: ")


def test_a_run_that_fails_is_no_row(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        common.train(
            "grpo", {"num_iterations": 1}, tmp_path / "run", lambda source: "import sys; sys.exit(1)"
        )


def test_all_runs_of_the_grid_make_the_same_steps_without_a_kl(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "FLAGS", grid.FLAGS | {"num_iterations": 1, "batch_size": 16})
    monkeypatch.chdir(ROOT)
    grid.measure(tmp_path / "run", 1, 2e-4, "rloo", "rloo")  # rloo.py makes one step, and has a KL
    flags = json.loads((tmp_path / "run" / "args.json").read_text())
    assert (flags["num_minibatches"], flags["kl_coef"]) == (2, 0.0)


def test_the_rows_are_those_that_the_pages_show():
    """No cell is missing and none is left over."""
    cells = {"grid": grid.CELLS, "curves": pictures.CELLS}
    cells["seeds"] = [{"seed": x, "method": y} for x, y in product(range(1, seeds.SEEDS + 1), seeds.METHODS)]
    for name, expected in cells.items():
        rows = [{key: row[key] for key in expected[0]} for row in common.load(name)]
        assert sorted(map(str, rows)) == sorted(map(str, expected))
    assert SOURCES["rloo"].count(seeds.GROUP) == 1


def test_a_row_of_the_kl_terms_is_what_the_code_computes():
    names = ("vocabulary", "depth", "way", "term")
    rows = {tuple(row[x] for x in names): row for row in common.load("exact_kl")}
    cell = (3, 4, "rare", "k3 in the loss")
    assert exact.measure_kl(None, *cell).items() <= rows[cell].items()


SMALLER = {"learn_baseline": {"count": 5}, "exact_length": {"pace": 1.0}}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_same_rows_give_the_same_picture(name, tmp_path):
    one, two = (pictures.save(name, tmp_path / x, **SMALLER.get(name, {})) for x in "ab")
    assert one.read_bytes() == two.read_bytes()
    with Image.open(one) as image:
        assert image.width == 920 and not {"Software", "date:create"} & image.info.keys()
        assert image.getpixel((0, 0))[3] == 0 and image.getcolors(256) is None  # transparent, and not empty


def test_every_picture_of_the_pages_has_its_code():
    drawn = {ROOT / "docs" / f"{name}.png" for name in pictures.PICTURES}
    assert drawn == {*ROOT.glob("docs/**/*.png")}
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    links = [(page, file) for page in pages for file in re.findall(r"\]\(([^)\s]+\.png)\)", page.read_text())]
    assert {(page.parent / file).resolve() for page, file in links} == drawn
