"""Task "export": a DSpark drafter as a DeepSpec checkpoint, which other engines serve."""

from pathlib import Path

from ml_collections import ConfigDict

from specjax.checkpoints.dspark import export_dspark
from specjax.checkpoints.files import check_place
from specjax.drafters import DSpark
from specjax.evaluation.report import environment
from specjax.files import write_json
from specjax.tasks.common import load_models, open_workdir, plain_config


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the task; see configs/export.py.

    Raises:
      ValueError: bad settings, models that cannot be loaded, a drafter that the format does
        not hold, or a workdir that cannot be written to or has an exported drafter.
    """
    values = plain_config(config)
    if not config.drafter:
        raise ValueError("nothing to export: set config.drafter to a DSpark drafter's folder")
    open_workdir(workdir, config.task)
    check_place(workdir / "deepspec", replace=config.replace)
    target, drafter = load_models(config)
    model = drafter.model
    if not isinstance(model, DSpark):
        raise ValueError(
            f"{drafter.name!r} is not a DSpark drafter, and DeepSpec's format holds no other: "
            f"name one, and of 'prompt_lookup+SOURCE' the source alone"
        )
    folder = workdir / "deepspec"
    export_dspark(folder, model, drafter.params, target, dtype=target.dtype, replace=config.replace)
    size = sum(path.stat().st_size for path in folder.iterdir())
    report = {
        "task": config.task,
        "config": values,
        "environment": environment(),
        "drafter_bytes": size,
    }
    write_json(workdir / "report.json", report)
    write_json(workdir / "config.json", values)
    limits = {"tokens": model.config.draft_vocab_size, "candidates": model.config.candidates}
    named = " and ".join(f"{limit} {what}" for what, limit in limits.items() if limit)
    if named:
        print(
            f"Other engines draft from all {model.config.backbone.vocab_size} tokens, specjax "
            f"from {named}: theirs may accept other drafts"
        )
    print(f"Drafter in DeepSpec's format: {folder} ({size / 1e6:.1f} MB)")
