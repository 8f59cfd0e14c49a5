"""Task "generate": completes built-in prompts one by one, with and without drafter."""

from pathlib import Path

from ml_collections import ConfigDict

from specjax.api import encode_prompts
from specjax.data.prompts import builtin_prompt
from specjax.evaluation.comparison import compare, outputs
from specjax.tasks.common import (
    ProgressBar,
    decode_settings,
    enable_compilation_cache,
    load_models,
    open_workdir,
    plain_config,
    suit_draft_len,
    write_results,
)


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the task; see configs/quickstart.py.

    Raises:
      ValueError: bad settings, unknown names, a workdir that cannot be written to, or
        models that cannot be loaded.
    """
    config = config.copy_and_resolve_references()  # to complete it
    plain_config(config)  # can be written
    open_workdir(workdir, config.task)
    enable_compilation_cache(config.compilation_cache)
    decode_settings(config, batch_size=1)  # are possible
    texts = {name: builtin_prompt(name) for name in config.prompts}
    if not texts:
        raise ValueError("config.prompts is empty: name at least one built-in prompt")
    target, drafter = load_models(config)
    suit_draft_len(config, drafter)
    settings = decode_settings(config, batch_size=1)
    ids = encode_prompts(target, list(texts.values()), config.chat)
    with ProgressBar(outputs(target, len(ids), settings, config.check)) as bar:
        comparisons = compare(
            target,
            drafter,
            {name: [prompt] for name, prompt in zip(texts, ids, strict=True)},
            settings,
            check=config.check,
            gap_tolerance=config.gap_tolerance,
            on_batch=bar.tell,
        )
    heading = ""
    for comparison in comparisons:
        completion = comparison.speculative.texts
        assert completion is not None  # text prompts had a tokeniser
        prompt = texts[comparison.name]
        heading += f"--- {comparison.name} ---\n{prompt}\n\n{completion[0].strip()}\n\n"
    write_results(config, workdir, target, comparisons, "prompt_name", heading)
