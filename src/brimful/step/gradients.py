"""Where gradients are accumulated, in the precision that the run file asks for, and how they are scaled in fp16."""

import torch
from torch import nn


class WideGradients:
    """Accumulates gradients in a wider type than the weights have: each slice's gradient is added and let go.

    With as many slices as rows, bf16 accumulation loses more of the gradient with every slice; this does not.
    """

    def __init__(self, parameters: list[nn.Parameter], wide: torch.dtype) -> None:
        self.wide = wide
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        parameter.grad = None
        if parameter in self.sums:
            self.sums[parameter].add_(grad)
        else:
            self.sums[parameter] = grad.to(self.wide)

    def hand_over(self, masters: "dict[nn.Parameter, nn.Parameter] | None") -> None:
        """Give the sums to whoever is updated: the masters if there are any, else the weights in their own type."""
        for parameter, total in self.sums.items():
            if masters is not None:
                masters[parameter].grad = total
            else:
                parameter.grad = total.to(parameter.dtype)
        self.sums.clear()


class LossScale:
    """fp16 gradients underflow: the loss is scaled up, and a step whose gradients overflow is skipped."""

    GROW_EVERY = 2000

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), 65536.0, device=device)
        self.steady = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Divide in place by the scale; the result is 1 where some gradient is not finite."""
        overflow = torch.zeros((), device=self.scale.device)
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for grad in grads:
            by_type.setdefault(grad.dtype, []).append(grad)
        for same in by_type.values():
            torch._amp_foreach_non_finite_check_and_unscale_(same, overflow, self.scale.reciprocal())
        return overflow

    def update(self, overflow: torch.Tensor) -> None:
        """Halve the scale after an overflow, double it after a long stretch without."""
        torch._amp_update_scale_(self.scale, self.steady, overflow, 2.0, 0.5, self.GROW_EVERY)
