"""A plugin of vLLM, loaded by its own Python in all its processes: on CPUs it returns the experts that it used.

vLLM 0.32 has all parts of that (gates that report their choice, rows kept with cached blocks, a field of the response)
but fills them from its second model runner only, whose kernels need Triton. The runner for CPUs is of the first kind;
here it feeds the same parts. vLLM finds the plugin by the `dist-info` folder beside this file.
"""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np

ENABLED = "ROLLART_RECORD_EXPERTS"  # of the environment


def register() -> None:
    if os.environ.get(ENABLED) != "1":
        return
    from vllm.config import VllmConfig  # type: ignore[import-not-found]
    from vllm.v1.worker import cpu_worker  # type: ignore[import-not-found]

    if not issubclass(cpu_worker.CPUModelRunner, _Recording):
        cpu_worker.CPUModelRunner = type("CPUModelRunner", (_Recording, cpu_worker.CPUModelRunner), {})
        _accept_first_runner(VllmConfig)


def _accept_first_runner(config: Any) -> None:
    """Where vLLM checks that its settings can return experts. Its other conditions are checked as ever."""
    check = config._verify_aux_output_compatibility

    def verify(self: Any) -> None:
        second = config.use_v2_model_runner
        config.use_v2_model_runner = property(lambda _: True)
        try:
            check(self)
        finally:
            config.use_v2_model_runner = second

    config._verify_aux_output_compatibility = verify


class _Recording:
    """Before vLLM's model runner in the order of its methods. Needs synchronous scheduling and no speculation: each
    step is sampled before the next begins, and every token of it counts."""

    vllm_config: Any
    input_batch: Any
    query_start_loc: Any
    execute_model_state: Any
    _recorder: Any = None
    _recorded: Any = None

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **more: Any) -> None:
        from vllm.distributed.aux_output_connector.worker import (  # type: ignore[import-not-found]
            get_aux_output_connector,
        )

        runner: Any = super()
        runner.initialize_kv_cache(kv_cache_config, is_profiling, **more)
        if not is_profiling:
            self._recorder = get_aux_output_connector(runner.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.begin_step(scheduler_output.aux_output_connector_metadata)
        runner: Any = super()
        output = runner.execute_model(scheduler_output, *args, **kwargs)
        if self.execute_model_state is not None:  # something was computed
            count = len(self.input_batch.req_ids)
            rows = SimpleNamespace(
                req_ids=list(self.input_batch.req_ids),
                query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:count].copy(),
            )
            self._recorded = self._recorder.prepare_output(rows)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        runner: Any = super()
        output = runner.sample_tokens(*args, **kwargs)
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            recorded.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = recorded.process_output()
        return output
