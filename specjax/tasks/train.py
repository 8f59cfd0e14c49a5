"""Task "train": a drafter for a target, or a target with a drafter that learns beside it."""

import dataclasses
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from specjax.evaluation.report import environment
from specjax.files import write_json
from specjax.tasks.common import enable_compilation_cache, open_workdir, plain_config
from specjax.tasks.plans import make_plan
from specjax.training.trainer import Best, Trainer, Training


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the task; see configs/train.py. Stopped, it goes on from where it was.

    Raises:
      ValueError: bad settings, a cache that is missing, unfinished or damaged, texts that
        cannot be read, or a workdir that holds another run.
    """
    values = plain_config(config)
    open_workdir(workdir, config.task)
    enable_compilation_cache(config.compilation_cache)
    settings = Training(**config.training, seed=config.seed)
    plan = make_plan(config, workdir)
    trainer = Trainer(plan.objective, plan.trained, plan.fixed, plan.data, settings)
    done = trainer.last_step(workdir)
    options = {"unit": " steps", "dynamic_ncols": True, "desc": "compiling"}
    with tqdm(total=settings.steps, initial=done, **options) as bar:
        shown: dict[str, str] = {}

        def show(step: int, log: dict[str, Any]) -> None:
            if step > done:  # compiled
                bar.set_description(refresh=False)
            bar.update(step - bar.n)
            held_out = "held_out_" if log.get("set") == "held_out" else ""
            for name in ("total", "main", "expected_length"):
                if name in log:
                    shown[held_out + name] = f"{log[name]:.3f}"
            if log:
                bar.set_postfix(shown)

        try:
            trainer.run(
                workdir,
                eval_every=config.eval_every,
                save_every=config.save_every,
                eval_first=bool(config.start),
                on_step=show,
            )
        except KeyboardInterrupt:
            if bar.n > done and trainer.last_step(workdir):
                folders = plan.save(trainer.best(workdir).params)
                bar.write(f"The best so far: {', '.join(map(str, folders.values()))}")
            raise
    best = trainer.best(workdir)
    folders = plan.save(best.params)
    sizes = {
        f"{name}_bytes": sum(path.stat().st_size for path in folder.iterdir())
        for name, folder in folders.items()
    }
    report = {
        "task": config.task,
        "config": values,
        "environment": environment(),
        "training": dataclasses.asdict(settings),
        "objective": dataclasses.asdict(plan.objective),
        "sequences": len(plan.data),
        "held_out": best.losses,
        "best_step": best.step,
        **sizes,
    }
    write_json(workdir / "report.json", report)
    write_json(workdir / "config.json", values)
    print(_summary(best))
    for name, folder in folders.items():
        print(f"{name.capitalize()}: {folder} ({sizes[f'{name}_bytes'] / 1e6:.1f} MB)")


def _summary(best: Best) -> str:
    """What the losses on the held-out sequences say."""
    losses, parts = best.losses, []
    if "main" in losses:
        parts.append(f"loss of the target {losses['main']:.3f} nats a token")
    acceptance = losses.get("acceptance_G") or losses.get("acceptance_K")
    if acceptance:
        by_position = ", ".join(f"{value:.2f}" for value in acceptance)
        length = f"accepted length {losses['expected_length']:.2f} at temperature 1"
        parts.append(f"{length}, by position {by_position}")
    return f"Held out, after {best.step} steps: {'; '.join(parts)}"
