"""experiments/gpu_check.py runs, as it does on a machine without tyro and datasets."""

import json
import os

from conftest import ROOT, launch


def test_small_models_pass_on_a_cpu(tmp_path):
    for name in ("tyro", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [ROOT / "experiments" / "gpu_check.py", "--small", "--json", tmp_path / "check.json"]
    output = launch(*command, env=env, cwd=ROOT, check=False).stdout
    results = json.loads((tmp_path / "check.json").read_text())["results"]
    assert len(results) > 20 and not [row for row in results if row["result"] == "FAIL"], output
