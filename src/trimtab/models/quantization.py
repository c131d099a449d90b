"""int8 linear layers for CPUs: int8 weights per output channel, int8 activations per row.

torch's own dynamic quantization takes one activation scale for the whole batch and lets 16-bit sums saturate on
processors without VNNI: measured on SmolLM2-135M that is a KL divergence of 15.8 against float32. Here every row has
its own scale (so a request's result does not depend on its neighbours), weights leave headroom for the sums, and
outlier channels are first moved from activations into weights (SmoothQuant, Xiao et al. 2023): KL 0.03
(`benchmarks/int8_quality.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Two products are summed in 16 bits by the AVX2 kernel: 255 * w * 2 stays under 2^15 up to w = 64. Saturation needs
# two extreme neighbours, so some above costs less than the lost resolution: KL .042 at 63, .034 at 80, .024 at 112.
WEIGHT_MAX_AVX2 = 112
WEIGHT_MAX_VNNI = 127
SMOOTHING_ALPHA = 0.5


def weight_max() -> int:
    """Largest weight magnitude that this processor's kernel multiplies without saturating its sums."""
    return WEIGHT_MAX_VNNI if torch.cpu._is_vnni_supported() else WEIGHT_MAX_AVX2


class Int8Linear(nn.Module):
    """``y = x Wᵀ + b`` with int8 weights and a scale per row of x.

    Args:
        weight: ``[out_features, in_features]`` float weight.
        bias: ``[out_features]`` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        scales = (weight.abs().amax(1).float() / weight_max()).clamp_min(1e-12)
        int8_weight = (weight.float() / scales[:, None]).round_().clamp_(-weight_max(), weight_max()).to(torch.int8)
        self._pack(int8_weight, scales, None if bias is None else bias.float())

    @classmethod
    def from_tensors(cls, int8_weight: Tensor, scales: Tensor, bias: Tensor | None) -> Int8Linear:
        """A layer from what :meth:`tensors` returned."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.out_features, layer.in_features = int8_weight.shape
        layer._pack(int8_weight, scales, bias)
        return layer

    def _pack(self, int8_weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        with _quiet_quantization():
            zero_points = torch.zeros(self.out_features, dtype=torch.int64)
            quantized = torch._make_per_channel_quantized_tensor(int8_weight, scales.double(), zero_points, 0)
            self._packed: Any = torch.ops.quantized.linear_prepack(quantized, None)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    def tensors(self) -> dict[str, Tensor]:
        """``int8_weight [out, in]``, ``scales [out]`` float32 and, if there is one, ``bias [out]``."""
        weight, _ = torch.ops.quantized.linear_unpack(self._packed)
        found = {"int8_weight": weight.int_repr(), "scales": weight.q_per_channel_scales().float()}
        return found | ({} if self.bias is None else {"bias": self.bias.data})

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.in_features)
        # abs().amax() is vectorised; vector_norm(inf) takes 4 to 10 times as long from 16 rows up
        row_max = rows.abs().amax(-1, keepdim=True).clamp_min_(1e-12)
        output: Tensor = self._multiply(rows / row_max, 1 / 127, 128, self._packed).mul_(row_max)
        if self.bias is not None:
            output += self.bias
        return output.view(*hidden.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@contextmanager
def _quiet_quantization() -> Iterator[None]:
    """torch warns that its eager quantization is in maintenance; the kernels are what we need of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def quantize_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` below ``module`` by an :class:`Int8Linear`, in place."""
    replace_linears(module, lambda _, linear: Int8Linear(linear.weight.data, getattr(linear.bias, "data", None)))


def replace_linears(module: nn.Module, make: Callable[[str, nn.Linear], nn.Module], prefix: str = "") -> None:
    """Replace every `nn.Linear` below ``module`` by ``make(path, linear)``, in place."""
    for name, child in list(module.named_children()):
        path = f"{prefix}{name}"
        if isinstance(child, nn.Linear):
            setattr(module, name, make(path, child))
        else:
            replace_linears(child, make, f"{path}.")


def smooth(model: nn.Module, run_calibration: Callable[[], object]) -> None:
    """Move outlier channels of activations into the weights that read them; the function computed stays the same.

    Only pairs that are known to commute with a per-channel scale are touched: an RMS norm and the projections that
    read it, an up projection and the down projection behind it.

    Args:
        model: decoder with `layers`, each `input_layernorm`, `self_attn`, `post_attention_layernorm`, `mlp`.
        run_calibration: runs the model once on some text; only the largest activation per channel is taken from it.
    """
    layers = list(getattr(model, "layers", []))
    pairs = [pair for layer in layers for pair in _scalable_pairs(layer)]
    input_max: dict[nn.Linear, Tensor] = {}

    def record(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        channel_max = arguments[0].reshape(-1, module.in_features).abs().amax(0)
        seen = input_max.get(module)
        input_max[module] = channel_max if seen is None else torch.maximum(seen, channel_max)

    handles = [readers[0].register_forward_pre_hook(record) for _, readers in pairs]
    try:
        run_calibration()
    finally:
        for handle in handles:
            handle.remove()
    for producer, readers in pairs:
        activation_max = input_max[readers[0]].clamp_min(1e-5)
        reader_max = torch.stack([reader.weight.abs().amax(0) for reader in readers]).amax(0).clamp_min(1e-5)
        scale = activation_max**SMOOTHING_ALPHA / reader_max ** (1 - SMOOTHING_ALPHA)
        weight = producer.weight
        assert isinstance(weight, Tensor)
        weight.data.div_(scale if weight.dim() == 1 else scale[:, None])
        if getattr(producer, "bias", None) is not None:
            producer.bias.data.div_(scale)  # type: ignore[operator]
        for reader in readers:
            reader.weight.data.mul_(scale)


def _scalable_pairs(layer: nn.Module) -> list[tuple[nn.Module, Sequence[nn.Linear]]]:
    def linears(owner: str, *names: str) -> list[nn.Linear] | None:
        parent = getattr(layer, owner, None)
        found = [getattr(parent, name, None) for name in names]
        return (
            [one for one in found if isinstance(one, nn.Linear)]
            if all(isinstance(f, nn.Linear) for f in found)
            else None
        )

    pairs: list[tuple[nn.Module, Sequence[nn.Linear]]] = []
    attention = linears("self_attn", "q_proj", "k_proj", "v_proj")
    gate_up, down = linears("mlp", "gate_proj", "up_proj"), linears("mlp", "down_proj")
    for norm_name, readers in (("input_layernorm", attention), ("post_attention_layernorm", gate_up)):
        norm = getattr(layer, norm_name, None)
        if readers and norm is not None and scales_by_weight(norm, readers[0].in_features):
            pairs.append((norm, readers))
    if gate_up and down:
        pairs.append((gate_up[1], down))
    return pairs


def scales_by_weight(norm: nn.Module, size: int) -> bool:
    """Whether a norm multiplies by its `weight` (Llama, Qwen) and not by 1 + weight (Gemma): asked, not assumed."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != (size,) or getattr(norm, "bias", None) is not None:
        return False
    probe = torch.linspace(-1, 1, size, dtype=weight.dtype, device=weight.device).view(1, 1, -1)
    saved = weight.data
    with torch.no_grad():
        before = norm(probe)
        weight.data = saved * 2
        after = norm(probe)
        weight.data = saved
    return torch.allclose(after, before * 2, rtol=1e-3, atol=1e-5)
