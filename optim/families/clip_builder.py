"""Builds a clip program op by op: checks each tensor's shape against the stream it reads, and numbers the values."""

from __future__ import annotations

from dataclasses import replace

from ..errors import WeightsError
from ..program import Linear, Op, Program, Value
from ..video.ops import (
    Border,
    ClipActivation,
    ClipAttention,
    ClipConv,
    ClipNorm,
    ClipScale,
    FirstFrame,
    Skip,
    TimeUpsample,
    Unpack,
    WeightForm,
)
from .keys import Keys


class ClipBuilder:
    """Collects ops and values; every method that adds an op returns the number of the value it writes."""

    def __init__(self, keys: Keys, latent_channels: int) -> None:
        """Start from a latent of that many channels."""
        self.keys = keys
        self._ops: list[Op] = []
        self._values = [Value(channels=latent_channels, scale=(1, 1, 1))]

    def channels(self, value: int) -> int:
        """Channels of a value."""
        return self._values[value].channels

    # -- norms

    def group_norm(self, name: str, source: int, *, groups: int, eps: float, scope: int, offset: int = 0) -> ClipNorm:
        """GroupNorm `name` over a stream. WeightsError if the groups do not divide its channels."""
        channels = self.channels(source)
        self.expect(f"{name}.weight", (channels,))
        self.expect(f"{name}.bias", (channels,))
        if channels % groups:
            raise WeightsError(
                f"{self.keys.full(name)!r} has {channels} channels, which {groups} groups do not divide; "
                "if the decoder was trained with another group count, pass it as the hint norm_groups"
            )
        full = self.keys.full
        return ClipNorm(
            kind="group", weight=full(f"{name}.weight"), bias=full(f"{name}.bias"), groups=groups, eps=eps,
            scope=scope, scope_offset=offset,
        )  # fmt: skip

    def rms_norm(self, name: str, source: int, *, eps: float = 1e-12) -> ClipNorm:
        """RMS norm with the weight `name` [C, 1, 1(, 1)]; eps is that of torch's normalize."""
        channels, shape = self.channels(source), self.keys.shape(name)
        if shape[:1] != (channels,) or any(n != 1 for n in shape[1:]):
            raise WeightsError(
                f"{self.keys.full(name)!r} has shape {list(shape)}, but one value for each of {channels} channels is "
                "expected; the file is damaged"
            )
        return ClipNorm(kind="rms", weight=self.keys.full(name), eps=eps)

    # -- ops

    def conv(
        self, name: str, source: int, *, form: WeightForm = "conv3d", norm: ClipNorm | None = None,
        act: ClipActivation = "none", causal: bool = True, time_border: str = "zero", border: Border = "zero",
        upsample_time: TimeUpsample = "none", upsample: int = 1, first_frame: FirstFrame = "same", drop: int = 0,
        last_of_one: bool = False, unpack: Unpack | None = None, residual: int | None = None, skip: Skip | None = None,
        gain: str | None = None, noise: str | None = None, post_act: ClipActivation = "none", bias: bool = True,
        out_gain: float = 1.0, out_offset: float = 0.0,
    ) -> int:  # fmt: skip
        """Convolution `name`, its kernel and width read from its weight; causal, or symmetric in time.

        `residual` alone is added as it is; with `skip`, as that says.
        """
        weight = f"{name}.weight"
        out, read, kernel = self._weight(weight, form)
        have, full = self.channels(source), self.keys.full(weight)
        if read != have:
            raise WeightsError(f"{full!r} reads {read} channels, but its input has {have}; the file is damaged")
        if form == "conv3d" and kernel[0] % 2 == 0:
            raise WeightsError(f"{full!r} reads {kernel[0]} frames at a time; only odd numbers are known")
        if any(k % 2 == 0 for k in kernel[1:]) or kernel[1] != kernel[2]:
            raise WeightsError(f"{full!r} has a {kernel[1]}x{kernel[2]} kernel; only odd square kernels are known")
        if bias:
            self.expect(f"{name}.bias", (out,))
        t, s = (unpack.t, unpack.s) if unpack else (1, 1)
        if out % (t * s * s):
            raise WeightsError(f"{full!r} gives {out} channels, which {t * s * s} offsets do not divide")
        back = 0 if causal else (kernel[0] - 1) // 2
        if residual is not None and skip is None:
            skip = Skip()
        op = ClipConv(
            name=self.keys.full(name), inputs=(source,) if residual is None else (source, residual),
            output=len(self._values), weight=full, form=form, bias=self.keys.full(f"{name}.bias") if bias else None,
            in_channels=read, out_channels=out, kernel=kernel, norm=norm, act=act, front=kernel[0] - 1 - back,
            back=back, time_border="replicate" if time_border == "replicate" else "zero", border=border,
            upsample_time=upsample_time, upsample=upsample, first_frame=first_frame, drop=drop,
            last_of_one=last_of_one, unpack=unpack, skip=skip if residual is not None else None,
            gain=None if gain is None else self.keys.full(gain), noise=None if noise is None else self.keys.full(noise),
            post_act=post_act, out_gain=out_gain, out_offset=out_offset,
        )  # fmt: skip
        channels = out // (t * s * s)
        if first_frame == "bypass" and channels != have:
            raise WeightsError(
                f"{full!r} gives {channels} channels, but the first frame has {have}; the file is damaged"
            )
        self._check_skip(op, channels)
        grow_t = t * (1 if upsample_time == "none" else 2)
        return self._add(op, channels, source, grow_t, upsample * s)

    def attention(self, op: ClipAttention, source: int) -> int:
        """Add an attention whose numbers are still open (inputs and output are set here)."""
        return self._add(replace(op, inputs=(source,), output=len(self._values)), self.channels(source), source, 1, 1)

    def linear(self, name: str, out: int, channels: int, *, bias: bool = True) -> Linear:
        """Projection `name`: weight [out, channels] with any number of trailing ones."""
        shape = self.keys.shape(f"{name}.weight")
        if shape[:2] != (out, channels) or any(n != 1 for n in shape[2:]):
            raise WeightsError(
                f"{self.keys.full(name)!r} has shape {list(shape)}; [{out}, {channels}] is expected, with or without "
                "ones at the end"
            )
        if bias:
            self.expect(f"{name}.bias", (out,))
        full = self.keys.full
        return Linear(weight=full(f"{name}.weight"), bias=full(f"{name}.bias") if bias else None)

    def scale(self, name: str, source: int, **fields: object) -> int:
        """A ClipScale with these fields; tensor names in `scale` and `shift` are short ones."""
        names = {k: self.keys.full(str(fields[k])) if fields.get(k) else None for k in ("scale", "shift")}
        op = ClipScale(
            name=self.keys.full(name), inputs=(source,), output=len(self._values), **{**fields, **names}  # type: ignore[arg-type]
        )  # fmt: skip
        return self._add(op, self.channels(source), source, 1, 1)

    def program(self, family: str, working_dtypes: tuple[str, ...], *, unit_range: bool = False) -> Program:
        """The finished program."""
        return Program(
            family=family, ops=tuple(self._ops), values=tuple(self._values), working_dtypes=working_dtypes,
            unit_range=unit_range,
        )  # fmt: skip

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """WeightsError unless the tensor has this shape."""
        got, full = self.keys.shape(name), self.keys.full(name)
        if got != shape:
            raise WeightsError(f"{full!r} has shape {list(got)}, but {list(shape)} is expected; the file is damaged")

    # -- pieces

    def _weight(self, name: str, form: WeightForm) -> tuple[int, int, tuple[int, int, int]]:
        """(channels out, channels read, kernel) of a convolution's weight."""
        if form == "conv3d":
            out, read, *k3 = self.keys.shape(name, 5)
            return out, read, (k3[0], k3[1], k3[2])
        if form == "linear":
            out, read = self.keys.shape(name, 2)
            return out, read, (1, 1, 1)
        out, read, *k2 = self.keys.shape(name, 4)
        if form == "past":
            if read % 2:
                raise WeightsError(f"{self.keys.full(name)!r} reads {read} channels; two frames of equal width are due")
            return out, read // 2, (2, k2[0], k2[1])
        return out, read, (1, k2[0], k2[1])

    def _check_skip(self, op: ClipConv, channels: int) -> None:
        if op.skip is None:
            return
        have, unpack = self.channels(op.inputs[1]), op.skip.unpack
        given = have * op.skip.repeat // ((unpack.t * unpack.s**2) if unpack else 1)
        if given != channels:
            raise WeightsError(
                f"{op.weight!r} gives {channels} channels, to which {given} cannot be added; the file is damaged"
            )

    def _add(self, op: Op, channels: int, source: int, grow_t: int, grow_s: int) -> int:
        t, h, w = self._values[source].scale
        self._values.append(Value(channels=channels, scale=(t * grow_t, h * grow_s, w * grow_s)))
        self._ops.append(op)
        return op.output
