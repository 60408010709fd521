"""TRL's own losses on given tensors, in TRL's environment: reads a JSON object, prints losses and gradients.

Nothing of rollart is imported, since that environment does not have it.
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer


def grpo(case: dict[str, Any], given: dict[str, torch.Tensor]) -> tuple[float, list[float]]:
    """The mean over sequences of equal length, so over tokens."""
    current = given["logprobs"].clone().requires_grad_()
    flat = {name: values for name, values in given.items() if values.numel() == 24}
    rows = {name: values.view(4, 6) for name, values in {**flat, "logprobs": current}.items()}
    mask = torch.ones(4, 6, dtype=torch.float64)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (rows["logprobs"], torch.zeros_like(mask), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=case.get("level", "token"),
        beta=case.get("beta", 0.0),
        loss_type=case["type"],
        epsilon_low=0.2,
        epsilon_high=1.28 if case["type"] == "cispo" else 0.28,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=True,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
    )
    inputs = {
        "prompt_ids": torch.zeros(4, 1).long(),
        "prompt_mask": torch.ones(4, 1).long(),
        "completion_ids": torch.zeros(4, 6).long(),
        "completion_mask": mask,
        "advantages": rows["advantages"][:, 0],
        "old_per_token_logps": rows["old_logprobs"],
        "ref_per_token_logps": rows["reference_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, current)
    return loss.item(), gradient.tolist()


def jsd(case: dict[str, Any], given: dict[str, torch.Tensor]) -> tuple[float, list[float]]:
    from trl.experimental.gkd import GKDTrainer

    student = given["student"].view(24, -1).clone().requires_grad_()
    teacher = given["teacher"].view(24, -1)
    loss = GKDTrainer.generalized_jsd_loss(student, teacher, beta=case["mix"], reduction="batchmean")
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.item(), gradient.flatten().tolist()


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in asked["given"].items()}
    print(json.dumps([(jsd if "mix" in case else grpo)(case, given) for case in asked["cases"]]))
