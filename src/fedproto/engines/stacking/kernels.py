"""Convolutions of stacked images as Triton kernels that never write patches.

Each is a matrix product whose operands are gathered from the images while it runs (an implicit
GEMM), so that a step reads and writes activations once. Forward pass and input gradient go over
the kernel's taps; a program holds the four pixels of a block of 2×2 cells in four accumulators, so
that pooling needs no word between threads. A pooled cell passes its gradient to one pixel, which
its code names: weight gradients make that of the full image while they read it.

Dense layers of small batches are as fast as their weights can be read. A whole step of a small
model of dense layers is one kernel.

Weights lie as `fedproto.engines.stacking.blocks.Conv` packs them: [tap across, I, tap down, O], or
[I·T·T, O] where the input has few channels. Shapes: as in `fedproto.engines.stacking.formulas`.
"""

# Triton reads the functions itself: arguments have no Python types, and constants are upper case.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803

# Long: kernels share their layouts and helpers and are read beside each other.
from __future__ import annotations

import triton
import triton.language as tl

DEAD = tl.constexpr(4)


@triton.jit
def _cells(count, rows, columns, BLOCK: tl.constexpr):
    """A program's block of cells: which exist, their image, and their upper left pixel."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = cell % (rows * columns)
    return cell < count, cell // (rows * columns), index // columns * 2, index % columns * 2


@triton.jit
def _inside(live, row, column, height, width):
    return live & (row >= 0) & (row < height) & (column >= 0) & (column < width)


@triton.jit
def _image_tile(x, live, image, row, column, height, width, CHANNELS: tl.constexpr):
    """All channels of some pixels, ``[BLOCK, CHANNELS]``; 0 outside of the image."""
    inside = _inside(live, row, column, height, width)
    at = ((image * height + row) * width + column) * CHANNELS
    channel = tl.arange(0, CHANNELS)
    return tl.load(x + at[:, None] + channel[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _patch_tile(
    x, live, image, row, column, height, width, INS: tl.constexpr, TAPS: tl.constexpr,
    PATCH: tl.constexpr,
):  # fmt: skip
    """The patches around some pixels, ``[BLOCK, PATCH]``, filled up with zeros."""
    number = tl.arange(0, PATCH)
    channel = number // (TAPS * TAPS)
    down = row[:, None] + (number // TAPS % TAPS - TAPS // 2)[None, :]
    across = column[:, None] + (number % TAPS - TAPS // 2)[None, :]
    inside = _inside(live[:, None] & (channel < INS)[None, :], down, across, height, width)
    at = ((image[:, None] * height + down) * width + across) * INS + channel[None, :]
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def _finish(
    a, b, c, d, bias, y, code, live, image, row, column, height, width, OUTS: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Bias, pooling and ReLU of four pixels of each cell, or the four pixels with their bias."""
    channel = tl.arange(0, OUTS)
    if POOLED:
        top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        first = tl.where(a == top, 0, tl.where(b == top, 1, tl.where(c == top, 2, 3)))
        top += bias[None, :]
        at = ((image * (height // 2) + row // 2) * (width // 2) + column // 2) * OUTS
        where = at[:, None] + channel[None, :]
        tl.store(y + where, tl.maximum(top, 0.0), mask=live[:, None])
        passed = tl.where(top > 0, first, DEAD).to(tl.uint8)
        tl.store(code + where, passed, mask=live[:, None])
    else:
        for index in tl.static_range(4):
            down = row + index // 2
            across = column + index % 2
            at = ((image * height + down) * width + across) * OUTS
            inside = _inside(live, down, across, height, width)
            z = (a if index == 0 else b if index == 1 else c if index == 2 else d) + bias[None, :]
            tl.store(y + at[:, None] + channel[None, :], z, mask=inside[:, None])


@triton.jit
def forward_taps(
    x, weight, bias, y, code, x_row, weight_row, bias_row, y_row, count, rows, columns, height,
    width, INS: tl.constexpr, OUTS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    POOLED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolution, bias, pooling and ReLU, tap by tap: for inputs of many channels."""
    job = tl.program_id(1).to(tl.int64)
    x += job * x_row
    weight += job * weight_row
    live, image, row, column = _cells(count, rows, columns, BLOCK)
    ins = tl.arange(0, INS)
    outs = tl.arange(0, OUTS)
    tile = ins[:, None] * (TAPS * OUTS) + outs[None, :]
    a = tl.zeros((BLOCK, OUTS), tl.float32)
    b = tl.zeros((BLOCK, OUTS), tl.float32)
    c = tl.zeros((BLOCK, OUTS), tl.float32)
    d = tl.zeros((BLOCK, OUTS), tl.float32)
    for tap in range(TAPS * TAPS):
        down = row + tap // TAPS - TAPS // 2
        across = column + tap % TAPS - TAPS // 2
        w = tl.load(weight + (tap % TAPS * INS * TAPS + tap // TAPS) * OUTS + tile)
        p = _image_tile(x, live, image, down, across, height, width, INS)
        a = tl.dot(p, w, a, input_precision=PRECISION)
        p = _image_tile(x, live, image, down, across + 1, height, width, INS)
        b = tl.dot(p, w, b, input_precision=PRECISION)
        p = _image_tile(x, live, image, down + 1, across, height, width, INS)
        c = tl.dot(p, w, c, input_precision=PRECISION)
        p = _image_tile(x, live, image, down + 1, across + 1, height, width, INS)
        d = tl.dot(p, w, d, input_precision=PRECISION)
    shift = tl.load(bias + job * bias_row + outs)
    _finish(
        a, b, c, d, shift, y + job * y_row, code + job * y_row, live, image, row, column, height,
        width, OUTS, POOLED,
    )  # fmt: skip


@triton.jit
def forward_patches(
    x, weight, bias, y, code, x_row, weight_row, bias_row, y_row, count, rows, columns, height,
    width, filled, INS: tl.constexpr, OUTS: tl.constexpr, TAPS: tl.constexpr, PATCH: tl.constexpr,
    BLOCK: tl.constexpr, POOLED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with whole patches at once: for inputs of few channels."""
    job = tl.program_id(1).to(tl.int64)
    x += job * x_row
    live, image, row, column = _cells(count, rows, columns, BLOCK)
    number = tl.arange(0, PATCH)
    outs = tl.arange(0, OUTS)
    w = tl.load(
        weight + job * weight_row + number[:, None] * OUTS + outs[None, :],
        mask=(number < filled)[:, None],
        other=0.0,
    )
    p = _patch_tile(x, live, image, row, column, height, width, INS, TAPS, PATCH)
    a = tl.dot(p, w, input_precision=PRECISION)
    p = _patch_tile(x, live, image, row, column + 1, height, width, INS, TAPS, PATCH)
    b = tl.dot(p, w, input_precision=PRECISION)
    p = _patch_tile(x, live, image, row + 1, column, height, width, INS, TAPS, PATCH)
    c = tl.dot(p, w, input_precision=PRECISION)
    p = _patch_tile(x, live, image, row + 1, column + 1, height, width, INS, TAPS, PATCH)
    d = tl.dot(p, w, input_precision=PRECISION)
    shift = tl.load(bias + job * bias_row + outs)
    _finish(
        a, b, c, d, shift, y + job * y_row, code + job * y_row, live, image, row, column, height,
        width, OUTS, POOLED,
    )  # fmt: skip


@triton.jit
def input_gradient(
    dz, weight, dx, dz_row, weight_row, dx_row, count, rows, columns, height, width,
    INS: tl.constexpr, OUTS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``dx[h] = Σ_t dz[h − t + T//2] wₜ``."""
    job = tl.program_id(1).to(tl.int64)
    dz += job * dz_row
    weight += job * weight_row
    dx += job * dx_row
    live, image, row, column = _cells(count, rows, columns, BLOCK)
    ins = tl.arange(0, INS)
    outs = tl.arange(0, OUTS)
    tile = ins[None, :] * (TAPS * OUTS) + outs[:, None]
    a = tl.zeros((BLOCK, INS), tl.float32)
    b = tl.zeros((BLOCK, INS), tl.float32)
    c = tl.zeros((BLOCK, INS), tl.float32)
    d = tl.zeros((BLOCK, INS), tl.float32)
    for tap in range(TAPS * TAPS):
        down = row - tap // TAPS + TAPS // 2
        across = column - tap % TAPS + TAPS // 2
        w = tl.load(weight + (tap % TAPS * INS * TAPS + tap // TAPS) * OUTS + tile)
        g = _image_tile(dz, live, image, down, across, height, width, OUTS)
        a = tl.dot(g, w, a, input_precision=PRECISION)
        g = _image_tile(dz, live, image, down, across + 1, height, width, OUTS)
        b = tl.dot(g, w, b, input_precision=PRECISION)
        g = _image_tile(dz, live, image, down + 1, across, height, width, OUTS)
        c = tl.dot(g, w, c, input_precision=PRECISION)
        g = _image_tile(dz, live, image, down + 1, across + 1, height, width, OUTS)
        d = tl.dot(g, w, d, input_precision=PRECISION)
    for index in tl.static_range(4):
        down = row + index // 2
        across = column + index % 2
        at = ((image * height + down) * width + across) * INS
        inside = _inside(live, down, across, height, width)
        value = a if index == 0 else b if index == 1 else c if index == 2 else d
        tl.store(dx + at[:, None] + ins[None, :], value, mask=inside[:, None])


@triton.jit
def weight_gradient_taps(
    x, dy, code, out, x_row, dy_row, out_row, count, rows, columns, height, width,
    INS: tl.constexpr, OUTS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    POOLED: tl.constexpr, SUBTRACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dwₜ = Σ_h x[h + t − T//2]ᵀ dz[h]`` of one tap per program, or ``w −= dw``."""
    tap = tl.program_id(0)
    job = tl.program_id(1).to(tl.int64)
    x += job * x_row
    dy += job * dy_row
    code += job * dy_row
    ins = tl.arange(0, INS)
    outs = tl.arange(0, OUTS)
    total = tl.zeros((INS, OUTS), tl.float32)
    for first in range(0, count, BLOCK):
        cell = first + tl.arange(0, BLOCK)
        live = cell < count
        image = cell // (rows * columns)
        index = cell % (rows * columns)
        row = index // columns * 2
        column = index % columns * 2
        if POOLED:
            where = cell[:, None] * OUTS + outs[None, :]
            passed = tl.load(code + where, mask=live[:, None], other=DEAD)
            value = tl.load(dy + where, mask=live[:, None], other=0.0)
        for pixel in tl.static_range(4):
            down = row + pixel // 2
            across = column + pixel % 2
            if POOLED:
                g = tl.where(passed == pixel, value, 0.0)
            else:
                g = _image_tile(dy, live, image, down, across, height, width, OUTS)
            p = _image_tile(
                x, live, image, down + tap // TAPS - TAPS // 2, across + tap % TAPS - TAPS // 2,
                height, width, INS,
            )  # fmt: skip
            total = tl.dot(tl.trans(p), g, total, input_precision=PRECISION)
    out += job * out_row + (tap % TAPS * INS * TAPS + tap // TAPS) * OUTS
    tile = ins[:, None] * (TAPS * OUTS) + outs[None, :]
    if SUBTRACT:
        total = tl.load(out + tile) - total
    tl.store(out + tile, total)


@triton.jit
def weight_gradient_patches(
    x, dy, code, out, x_row, dy_row, out_row, count, rows, columns, height, width, part, filled,
    INS: tl.constexpr, OUTS: tl.constexpr, TAPS: tl.constexpr, PATCH: tl.constexpr,
    BLOCK: tl.constexpr, POOLED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for inputs of few channels: the sum over one part of the cells, all taps."""
    job = tl.program_id(1).to(tl.int64)
    x += job * x_row
    dy += job * dy_row
    code += job * dy_row
    number = tl.arange(0, PATCH)
    outs = tl.arange(0, OUTS)
    total = tl.zeros((PATCH, OUTS), tl.float32)
    begin = tl.program_id(0) * part
    end = tl.minimum(begin + part, count)
    for turn in range(0, part, BLOCK):
        cell = begin + turn + tl.arange(0, BLOCK)
        live = cell < end
        image = cell // (rows * columns)
        index = cell % (rows * columns)
        row = index // columns * 2
        column = index % columns * 2
        if POOLED:
            where = cell[:, None] * OUTS + outs[None, :]
            passed = tl.load(code + where, mask=live[:, None], other=DEAD)
            value = tl.load(dy + where, mask=live[:, None], other=0.0)
        for pixel in tl.static_range(4):
            down = row + pixel // 2
            across = column + pixel % 2
            if POOLED:
                g = tl.where(passed == pixel, value, 0.0)
            else:
                g = _image_tile(dy, live, image, down, across, height, width, OUTS)
            p = _patch_tile(x, live, image, down, across, height, width, INS, TAPS, PATCH)
            total = tl.dot(tl.trans(p), g, total, input_precision=PRECISION)
    out += (job * tl.num_programs(0) + tl.program_id(0)) * out_row
    tile = number[:, None] * OUTS + outs[None, :]
    tl.store(out + tile, total, mask=(number < filled)[:, None])


@triton.jit
def dense_forward(
    x, weight, bias, y, x_row, weight_row, bias_row, y_row, batch, inputs, units,
    BATCH: tl.constexpr, UNITS: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``y = x wᵀ + b`` with ReLU, a few units per program: the weight is read once."""
    job = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    sample = tl.arange(0, BATCH)
    weight += job * weight_row
    x += job * x_row
    total = tl.zeros((UNITS, BATCH), tl.float32)
    for first in range(0, inputs, STRIP):
        number = first + tl.arange(0, STRIP)
        w = tl.load(
            weight + unit[:, None] * inputs + number[None, :],
            mask=(unit < units)[:, None] & (number < inputs)[None, :],
            other=0.0,
        )
        p = tl.load(
            x + sample[None, :] * inputs + number[:, None],
            mask=(sample < batch)[None, :] & (number < inputs)[:, None],
            other=0.0,
        )
        total = tl.dot(w, p, total, input_precision=PRECISION)
    total += tl.load(bias + job * bias_row + unit, mask=unit < units, other=0.0)[:, None]
    total = tl.maximum(total, 0.0)
    where = y + job * y_row + sample[None, :] * units + unit[:, None]
    tl.store(where, total, mask=(sample < batch)[None, :] & (unit < units)[:, None])


@triton.jit
def dense_input_gradient(
    dz, weight, dx, dz_row, weight_row, dx_row, batch, inputs, units,
    BATCH: tl.constexpr, UNITS: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dx = dz w``, a strip of inputs per program."""
    job = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    sample = tl.arange(0, BATCH)
    weight += job * weight_row
    dz += job * dz_row
    total = tl.zeros((BATCH, STRIP), tl.float32)
    for first in range(0, units, UNITS):
        unit = first + tl.arange(0, UNITS)
        w = tl.load(
            weight + unit[:, None] * inputs + number[None, :],
            mask=(unit < units)[:, None] & (number < inputs)[None, :],
            other=0.0,
        )
        g = tl.load(
            dz + sample[:, None] * units + unit[None, :],
            mask=(sample < batch)[:, None] & (unit < units)[None, :],
            other=0.0,
        )
        total = tl.dot(g, w, total, input_precision=PRECISION)
    where = dx + job * dx_row + sample[:, None] * inputs + number[None, :]
    tl.store(where, total, mask=(sample < batch)[:, None] & (number < inputs)[None, :])


@triton.jit
def dense_descent(
    dz, x, weight, dz_row, x_row, weight_row, batch, inputs, units,
    BATCH: tl.constexpr, UNITS: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``w −= dzᵀ x`` of a tile of the weight per program."""
    job = tl.program_id(2).to(tl.int64)
    number = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    sample = tl.arange(0, BATCH)
    inside = (unit < units)[:, None] & (number < inputs)[None, :]
    where = weight + job * weight_row + unit[:, None] * inputs + number[None, :]
    w = tl.load(where, mask=inside)
    g = tl.load(
        dz + job * dz_row + sample[None, :] * units + unit[:, None],
        mask=(sample < batch)[None, :] & (unit < units)[:, None],
        other=0.0,
    )
    p = tl.load(
        x + job * x_row + sample[:, None] * inputs + number[None, :],
        mask=(sample < batch)[:, None] & (number < inputs)[None, :],
        other=0.0,
    )
    tl.store(where, w - tl.dot(g, p, input_precision=PRECISION), mask=inside)


@triton.jit
def _tile(rows, begin, first, inputs, units, IN: tl.constexpr, OUT: tl.constexpr):
    """Some units of a dense layer's weight, transposed; where they lie, and which exist."""
    number = tl.arange(0, IN)
    unit = first + tl.arange(0, OUT)
    where = begin + unit[None, :] * inputs + number[:, None]
    inside = (unit < units)[None, :] & (number < inputs)[:, None]
    return tl.load(rows + where, mask=inside, other=0.0), where, inside


@triton.jit
def _head_tile(rows, begin, first, inputs, units, IN: tl.constexpr, OUT: tl.constexpr):
    """Some inputs of the last layer's weight, transposed; where they lie, and which exist."""
    number = first + tl.arange(0, IN)
    unit = tl.arange(0, OUT)
    where = begin + unit[None, :] * inputs + number[:, None]
    inside = (unit < units)[None, :] & (number < inputs)[:, None]
    return tl.load(rows + where, mask=inside, other=0.0), where, inside


@triton.jit
def _move(rows, received, where, inside, value, change, pull, PROXIMAL: tl.constexpr):
    """Gradient descent, with a pull to the received weights."""
    if PROXIMAL:
        value += pull * (tl.load(received + where, mask=inside, other=0.0) - value)
    tl.store(rows + where, value - change, mask=inside)


# Long: one kernel is one function; a step has this many parts.
@triton.jit
def mlp_step(
    inputs, targets, samples, rows, received, start, steps, last_epoch, rate, proximal, count, loss,
    row_size, table, batch, channels, hidden, features, classes, weight1, bias1, weight2, bias2,
    weight3, bias3, BATCH: tl.constexpr, IN: tl.constexpr, HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr, CLASSES: tl.constexpr, PROXIMAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A whole local step of a model of two dense layers and a head, one job per program.

    The second layer is gone through in chunks of its units, forward and then again backward, where
    each chunk is changed as soon as it has been used.
    """
    job = tl.program_id(0).to(tl.int64)
    number = tl.load(count)
    busy = number < tl.load(steps + job)
    pace = tl.where(busy, tl.load(rate + job), 0.0)
    pull = pace * tl.load(proximal + job)
    sample = tl.arange(0, BATCH)
    at = tl.minimum(tl.load(start + job) + number * batch + sample, table - 1)
    index = tl.load(samples + at, mask=sample < batch, other=-1)
    live = (index >= 0) & busy
    index = tl.where(live, index, 0)
    share = tl.where(live, pace / tl.maximum(tl.sum(live.to(tl.int32), axis=0), 1), 0.0)
    channel = tl.arange(0, IN)
    x = tl.load(
        inputs + index[:, None] * channels + channel[None, :],
        mask=live[:, None] & (channel < channels)[None, :],
        other=0.0,
    )
    label = tl.load(targets + index, mask=live, other=0)
    rows += job * row_size
    received += job * row_size

    unit = tl.arange(0, HIDDEN)
    kind = tl.arange(0, CLASSES)
    w1, where1, inside1 = _tile(rows, weight1, 0, channels, hidden, IN, HIDDEN)
    b1 = tl.load(rows + bias1 + unit, mask=unit < hidden, other=0.0)
    h1 = tl.maximum(tl.dot(x, w1, input_precision=PRECISION) + b1[None, :], 0.0)
    b3 = tl.load(rows + bias3 + kind, mask=kind < classes, other=0.0)
    z = tl.zeros((BATCH, CLASSES), tl.float32) + b3[None, :]
    for first in range(0, features, CHUNK):
        part = first + tl.arange(0, CHUNK)
        w2, where2, inside2 = _tile(rows, weight2, first, hidden, features, HIDDEN, CHUNK)
        w3, where3, inside3 = _head_tile(rows, weight3, first, features, classes, CHUNK, CLASSES)
        b2 = tl.load(rows + bias2 + part, mask=part < features, other=0.0)
        h2 = tl.maximum(tl.dot(h1, w2, input_precision=PRECISION) + b2[None, :], 0.0)
        z = tl.dot(h2, w3, z, input_precision=PRECISION)

    z = tl.where((kind < classes)[None, :], z, float("-inf"))
    z -= tl.max(z, axis=1)[:, None]
    total = tl.sum(tl.exp(z), axis=1)
    hit = kind[None, :] == label[:, None]
    each = tl.log(total) - tl.sum(tl.where(hit, z, 0.0), axis=1)
    counts = live & (number >= tl.load(last_epoch + job))
    tl.store(loss + job, tl.load(loss + job) + tl.sum(tl.where(counts, each, 0.0), axis=0))
    dz = (tl.exp(z) / total[:, None] - hit.to(tl.float32)) * share[:, None]

    d1 = tl.zeros((BATCH, HIDDEN), tl.float32)
    for first in range(0, features, CHUNK):
        part = first + tl.arange(0, CHUNK)
        w2, where2, inside2 = _tile(rows, weight2, first, hidden, features, HIDDEN, CHUNK)
        w3, where3, inside3 = _head_tile(rows, weight3, first, features, classes, CHUNK, CLASSES)
        b2 = tl.load(rows + bias2 + part, mask=part < features, other=0.0)
        h2 = tl.maximum(tl.dot(h1, w2, input_precision=PRECISION) + b2[None, :], 0.0)
        d2 = tl.where(h2 > 0, tl.dot(dz, tl.trans(w3), input_precision=PRECISION), 0.0)
        d1 = tl.dot(d2, tl.trans(w2), d1, input_precision=PRECISION)
        dw3 = tl.dot(tl.trans(h2), dz, input_precision=PRECISION)
        dw2 = tl.dot(tl.trans(h1), d2, input_precision=PRECISION)
        _move(rows, received, where3, inside3, w3, dw3, pull, PROXIMAL)
        _move(rows, received, where2, inside2, w2, dw2, pull, PROXIMAL)
        db2 = tl.sum(d2, axis=0)
        _move(rows, received, bias2 + part, part < features, b2, db2, pull, PROXIMAL)
    d1 = tl.where(h1 > 0, d1, 0.0)
    dw1 = tl.dot(tl.trans(x), d1, input_precision=PRECISION)
    # Read again: kept, it would take up the registers all the time.
    w1, where1, inside1 = _tile(rows, weight1, 0, channels, hidden, IN, HIDDEN)
    _move(rows, received, where1, inside1, w1, dw1, pull, PROXIMAL)
    db1 = tl.sum(d1, axis=0)
    _move(rows, received, bias1 + unit, unit < hidden, b1, db1, pull, PROXIMAL)
    db3 = tl.sum(dz, axis=0)
    _move(rows, received, bias3 + kind, kind < classes, b3, db3, pull, PROXIMAL)
