"""Fine-tuning without labels: the sparse module learns the original's outputs, its zeros held."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from simplicit._progress import Progress, watcher
from simplicit.errors import SettingError, ShapeError
from simplicit.torch._batches import Batches, Outputs, mixed
from simplicit.torch._collect import Evaluating
from simplicit.torch._compressed import Compressed


@dataclass(frozen=True)
class Polished:
    """The result of :func:`polish`: losses on the held-out batches, before and after every epoch, and the epoch that was kept.

    Epoch 0 is the module as it was. The losses are divergences from the original's outputs; no label is involved.
    """

    losses: list[float]
    best: int
    kind: str

    def __repr__(self) -> str:
        return f"Polished(fine-tuned {len(self.losses) - 1} epochs, {self.kind} {self.losses[0]:.4g} to {self.losses[self.best]:.4g})"


def polish(
    compressed: Compressed,
    loader: Iterable[Any],
    *,
    epochs: int = 10,
    learning_rate: float = 4e-4,
    temperature: float = 2.0,
    held_out: Iterable[Any] | float = 0.1,
    augment: Callable[[Any], Any] | None = None,
    mix: bool = False,
    progress: str | Progress | None = None,
) -> Polished:
    """Fine-tune a compressed module towards the outputs of the original, with its zeros held.

    This is fine-tuning, without labels: Adam on all parameters, its rate falling to zero along a cosine, on the divergence
    of the outputs from the original's: KL at a temperature for logits, the mean square otherwise. Batch norms stay in
    evaluation mode. The loss on held-out batches is watched and the best state is kept, which may be the first.

    On samples that the original was trained on, its outputs may be nearly certain and hold little to learn. Its outputs
    for mixtures of two samples are not: with ``mix=True`` both the batches learned from and those held out are mixed.

    Parameters
    ----------
    compressed : Compressed
        Its ``module`` is changed in place.
    loader : iterable
        Batches as :func:`compress` takes them, gone through once an epoch; on any device.
    epochs : int, optional
        Passes over the loader.
    learning_rate : float, optional
        Adam's first rate.
    temperature : float, optional
        Temperature of the softmax of logits.
    held_out : iterable or float, optional
        Batches that are only watched, or the share of the loader's batches that are, at regular distances.
    augment : callable, optional
        Applied to every batch before it is learned from.
    mix : bool, optional
        Mix the samples of every batch in pairs: each becomes a random share of itself plus the rest of another one. A
        held-out batch is mixed in the same way every time. Needs inputs of floating point.
    progress : str or callable, optional
        As for :class:`simplicit.SIM`.

    Returns
    -------
    Polished
        The losses, and which epoch was kept.

    Examples
    --------
    >>> import torch
    >>> from simplicit.torch import compress, polish
    >>> _ = torch.manual_seed(0)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> batches = [torch.randn(50, 8) for _ in range(10)]
    >>> compressed = compress(mlp, batches, target_sparsity=0.6)
    >>> polished = polish(compressed, batches, epochs=5)
    >>> polished.losses[polished.best] < polished.losses[0]
    True
    """
    if epochs < 1 or not learning_rate > 0 or not temperature > 0:
        raise SettingError("epochs, learning_rate, temperature: expected positive numbers")
    module, original, like = compressed.module, compressed.original, compressed._batches
    batches = Batches(loader, module, like._forward, like._kwargs, like._output)
    every, watched = 0, None
    if isinstance(held_out, (int, float)):
        if not 0 < held_out <= 0.5:
            raise SettingError(f"held_out: expected batches, or a share above 0 and up to 0.5, got {held_out}")
        every = round(1 / held_out)
    else:
        watched = Batches(held_out, module, like._forward, like._kwargs, like._output)
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    wanted = [p.requires_grad for p in parameters]
    kinds: set[str] = set()

    def loss(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            teacher = batches.outputs(original, batch)
        student = batches.outputs(module, batch)
        kinds.add("KL" if teacher.logits else "mean square")
        return divergence(student, teacher, temperature)

    def held() -> float:
        total = count = 0.0
        with torch.no_grad():
            for number, (batch, size) in enumerate(watched if watched is not None else batches):
                if watched is not None or number % every == 0:
                    if mix:
                        batch = mixed(batch, size, torch.Generator().manual_seed(number))
                    total, count = total + float(loss(batch)) * size, count + size
        return total / count

    shown = watcher(progress)
    with Evaluating(module), Evaluating(original), torch.enable_grad():
        total = sum(1 for number, _ in enumerate(batches) if not every or number % every)
        if total == 0:
            raise ShapeError("loader: expected batches besides those held out, got none; give more, or held_out=batches of their own")
        optimizer = torch.optim.Adam(parameters, lr=learning_rate)
        handle = compressed.hold(optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5 + 0.5 * math.cos(math.pi * min(1.0, k / (epochs * total))))
        losses, best = [held()], 0
        kept = copy.deepcopy(module.state_dict())
        try:
            for p in parameters:
                p.requires_grad_(True)
            for epoch in range(1, epochs + 1):
                done = 0
                for number, (batch, size) in enumerate(batches):
                    if every and number % every == 0:
                        continue
                    batch = batch if augment is None else augment(batch)
                    batch = mixed(batch, size) if mix else batch
                    optimizer.zero_grad(set_to_none=True)
                    loss(batch).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    schedule.step()
                    done += 1
                    shown(f"fine-tuning, epoch {epoch} of {epochs}", done, total)
                losses.append(held())
                if losses[-1] < losses[best]:
                    best = epoch
                    kept = copy.deepcopy(module.state_dict())
        finally:
            handle.remove()
            module.load_state_dict(kept)
            for p, before in zip(parameters, wanted, strict=True):
                p.grad = None
                p.requires_grad_(before)
            compressed._model = None
            shown.close()
    polished = Polished(losses, best, kinds.pop())
    said = {"epochs": epochs, "best_epoch": best, "loss": losses[best], "loss_before": losses[0], "mix": mix}
    compressed.report.results["polished"] = said
    return polished


def divergence(student: Outputs, teacher: Outputs, temperature: float) -> torch.Tensor:
    """KL(teacher ‖ student) at a temperature, times its square, for logits; the mean square otherwise; a mean over places."""
    if teacher.logits:
        t = (teacher.values / temperature).movedim(teacher.axis, -1).log_softmax(-1)
        s = (student.values / temperature).movedim(student.axis, -1).log_softmax(-1)
        each = (t.exp() * (t - s)).sum(-1) * temperature**2
    else:
        each = (student.values - teacher.values).square()
        each = each.movedim(teacher.axis, -1).mean(-1) if each.dim() > 1 else each
    places = each.numel() if teacher.mask is None else float(teacher.mask.sum())
    return teacher.weighed(each) / max(places, 1)
