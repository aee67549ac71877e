"""Triton kernels of the stacked engine, for float32 and bfloat16 on CUDA.

A convolution is a matrix product whose operands are gathered from the images while it runs (an
implicit GEMM), so no patches are written and a step reads and writes activations once. The four
pixels of a 2×2 cell are neighbouring rows of the product, so that pooling happens in registers.
A pooled cell passes its gradient to one pixel, which its code names: the weight gradient unpools
while it reads. Weights and their gradients are float32; activations may be bfloat16.

Dense layers of small batches are as fast as their weights can be read. A whole training step of a
small model of dense layers is one kernel.

A convolution's weight is packed as [T·T·I, O], row tap by tap and then column. Shapes: as in
`fedproto.engines.stacking.formulas`.
"""

# Triton reads the functions itself: arguments have no Python types, and constants are upper case.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, C901, N803, N806

from __future__ import annotations

import triton
import triton.language as tl

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_HAS_PARTS = _VERSION >= (3, 6) and not triton.knobs.runtime.interpret

DEAD = tl.constexpr(4)

KNOWN_PRODUCTS = ("tf32", "tf32x3", "bf16x3") if _HAS_PARTS else ("tf32", "tf32x3")
"""Ways to multiply float32 on tensor cores."""


@triton.jit
def _pixel(row, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Image, row and column of pixels in order."""
    index = row % (HEIGHT * WIDTH)
    return row // (HEIGHT * WIDTH), index // WIDTH, index % WIDTH


@triton.jit
def _pixel_of_cell(cell, within, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Image, row and column of the pixels of 2×2 cells."""
    image, down, across = _pixel(cell, HEIGHT // 2, WIDTH // 2)
    return image, down * 2 + within // 2, across * 2 + within % 2


@triton.jit
def _strips(
    x, live, image, down, across, first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, ALONG: tl.constexpr, PADDED: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As `_patches`, for few channels: one row of taps is one strip of numbers in memory."""
    number = first % (ALONG * CHANNELS) + tl.arange(0, DEPTH)
    y = down + first // (ALONG * CHANNELS)
    at = (image * HEIGHT + y) * (WIDTH * CHANNELS)
    place = (across * CHANNELS)[:, None] + number[None, :]
    inside = (live & (y >= 0) & (y < HEIGHT))[:, None] & (number < ALONG * CHANNELS)[None, :]
    if PADDED:
        inside = inside & (place >= 0) & (place < WIDTH * CHANNELS)
    return tl.load(x + at[:, None] + place, mask=inside, other=0.0)


@triton.jit
def _patches(
    x, live, image, down, across, first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, ALONG: tl.constexpr, DIVIDE: tl.constexpr,
    SIGN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Numbers `first` to `first + DEPTH` of the patches at some places, ``[BLOCK, DEPTH]``.

    A patch lists its taps row by row, at each tap all channels. Where a block of numbers is of one
    tap, places and bounds are computed once per patch.
    """
    number = first + tl.arange(0, DEPTH)
    if CHANNELS % DEPTH == 0:
        tap = first // CHANNELS
        y = down + SIGN * (tap // ALONG)
        z = across + SIGN * (tap % ALONG)
        inside = live & (y >= 0) & (z >= 0)
        if DIVIDE > 1:
            inside = inside & (y % DIVIDE == 0) & (z % DIVIDE == 0)
            y = y // DIVIDE
            z = z // DIVIDE
        inside = inside & (y < HEIGHT) & (z < WIDTH)
        at = ((image * HEIGHT + y) * WIDTH + z) * CHANNELS
        where = at[:, None] + (number - tap * CHANNELS)[None, :]
        value = tl.load(x + where, mask=inside[:, None], other=0.0)
    else:
        tap = number // CHANNELS
        y = down[:, None] + SIGN * (tap // ALONG)[None, :]
        z = across[:, None] + SIGN * (tap % ALONG)[None, :]
        inside = live[:, None] & (number < TAPS * CHANNELS)[None, :] & (y >= 0) & (z >= 0)
        if DIVIDE > 1:
            inside = inside & (y % DIVIDE == 0) & (z % DIVIDE == 0)
            y = y // DIVIDE
            z = z // DIVIDE
        inside = inside & (y < HEIGHT) & (z < WIDTH)
        at = ((image[:, None] * HEIGHT + y) * WIDTH + z) * CHANNELS
        value = tl.load(x + at + (number % CHANNELS)[None, :], mask=inside, other=0.0)
    return value


@triton.jit
def convolve(
    x, weight, bias, y, code, x_row, weight_row, bias_row, y_row, count, IN_HEIGHT: tl.constexpr,
    IN_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INS: tl.constexpr,
    OUTS: tl.constexpr, DOWN: tl.constexpr, ALONG: tl.constexpr, STRIDE: tl.constexpr,
    PAD_DOWN: tl.constexpr, PAD_ALONG: tl.constexpr, BIASED: tl.constexpr, RELU: tl.constexpr,
    POOLED: tl.constexpr, BACKWARD: tl.constexpr, STRIPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A convolution with bias, perhaps ReLU or 2×2 max pooling; or the gradient of its input.

    A matrix product whose rows are the pixels that are written, whose inner dimension is the patch
    around each, and whose columns are channels. Backward, `x` is the gradient of the output and `y`
    that of the input: ``dx[h] = Σ_t dz[(h + pad − t) / stride] wₜ`` over the taps that divide.
    """
    READ: tl.constexpr = OUTS if BACKWARD else INS
    WRITTEN: tl.constexpr = INS if BACKWARD else OUTS
    TAPS: tl.constexpr = DOWN * ALONG
    SIGN: tl.constexpr = -1 if BACKWARD else 1
    DIVIDE: tl.constexpr = STRIDE if BACKWARD else 1
    INNER: tl.constexpr = ALONG * READ if STRIPS else TAPS * READ
    TURNS: tl.constexpr = (INNER + DEPTH - 1) // DEPTH
    job = tl.program_id(2).to(tl.int64)
    x += job * x_row
    weight += job * weight_row
    y += job * y_row
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    written = channel < WRITTEN
    row = tl.arange(0, ROWS)
    if POOLED:
        # In the accumulators of a warp group's product, rows that differ in bit 3 or 6 belong to
        # one thread: it then holds all pixels of a cell.
        QUARTERS: tl.constexpr = ROWS // 4 // 8
        cell = tl.program_id(0) * (ROWS // 4) + (row // 16 % QUARTERS) * 8 + row % 8
        live = cell < count
        image, down, across = _pixel_of_cell(
            cell, row // (16 * QUARTERS) * 2 + row // 8 % 2, HEIGHT, WIDTH
        )
    else:
        row += tl.program_id(0) * ROWS
        live = row < count
        image, down, across = _pixel(row, HEIGHT, WIDTH)
    if BACKWARD:
        down += PAD_DOWN
        across += PAD_ALONG
    else:
        down = down * STRIDE - PAD_DOWN
        across = across * STRIDE - PAD_ALONG
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in range(0, DOWN * TURNS if STRIPS else TURNS):
        if STRIPS:
            first = turn // TURNS * (ALONG * READ) + turn % TURNS * DEPTH
            p = _strips(
                x, live, image, down, across, first, IN_HEIGHT, IN_WIDTH, READ, ALONG,
                PAD_ALONG > 0, DEPTH,
            )  # fmt: skip
        else:
            first = turn * DEPTH
            p = _patches(
                x, live, image, down, across, first, IN_HEIGHT, IN_WIDTH, READ, TAPS, ALONG,
                DIVIDE, SIGN, DEPTH,
            )  # fmt: skip
        number = first + tl.arange(0, DEPTH)
        if BACKWARD:
            tap = number // OUTS * (INS * OUTS) + number % OUTS
            at = tap[:, None] + channel[None, :] * OUTS
        else:
            at = number[:, None] * OUTS + channel[None, :]
        if INNER % DEPTH == 0:
            w = tl.load(weight + at, mask=written[None, :], other=0.0)
        else:
            # Strips are filled up one by one, patches at the end.
            exists = (first % INNER + tl.arange(0, DEPTH) < INNER)[:, None] & written[None, :]
            w = tl.load(weight + at, mask=exists, other=0.0)
        total = tl.dot(p, w.to(p.dtype), total, input_precision=PRECISION)
    if POOLED:
        pixels = tl.reshape(total, (2, QUARTERS, 2, 8, COLUMNS))
        top = tl.max(tl.max(pixels, axis=2, keep_dims=True), axis=0, keep_dims=True)
        within = tl.reshape(tl.arange(0, 2), (2, 1, 1, 1, 1)) * 2
        within += tl.reshape(tl.arange(0, 2), (1, 1, 2, 1, 1))
        passed = tl.where(pixels == top, within, 3)
        passed = tl.reshape(tl.min(tl.min(passed, axis=2), axis=0), (ROWS // 4, COLUMNS))
        top = tl.reshape(top, (ROWS // 4, COLUMNS))
        if BIASED:
            top += tl.load(bias + job * bias_row + channel, mask=written, other=0.0)[None, :]
        cell = tl.program_id(0) * (ROWS // 4) + tl.arange(0, ROWS // 4)
        where = cell[:, None] * WRITTEN + channel[None, :]
        inside = (cell < count)[:, None] & written[None, :]
        tl.store(y + where, tl.maximum(top, 0.0).to(y.dtype.element_ty), mask=inside)
        found = tl.where(top > 0, passed, DEAD).to(tl.uint8)
        tl.store(code + job * y_row + where, found, mask=inside)
    else:
        if BIASED:
            total += tl.load(bias + job * bias_row + channel, mask=written, other=0.0)[None, :]
        if RELU:
            total = tl.maximum(total, 0.0)
        where = row[:, None] * WRITTEN + channel[None, :]
        inside = live[:, None] & written[None, :]
        tl.store(y + where, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def weight_gradient(
    x, dy, code, out, x_row, dy_row, out_row, count, part: tl.constexpr, IN_HEIGHT: tl.constexpr,
    IN_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INS: tl.constexpr,
    OUTS: tl.constexpr, DOWN: tl.constexpr, ALONG: tl.constexpr, STRIDE: tl.constexpr,
    PAD_DOWN: tl.constexpr, PAD_ALONG: tl.constexpr, POOLED: tl.constexpr, CELLS: tl.constexpr,
    SUBTRACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``dwₜ = Σ_h x[stride · h + t − pad]ᵀ dz[h]``, or ``w −= dw``.

    A program sums over one part of the pixels, for `DEPTH` numbers of a patch and some channels. By
    cells, `count`, `part` and `ROWS` are of pooled cells, which are then read once for four pixels.
    """
    TAPS: tl.constexpr = DOWN * ALONG
    TILES: tl.constexpr = (TAPS * INS + DEPTH - 1) // DEPTH
    job = tl.program_id(2).to(tl.int64)
    x += job * x_row
    dy += job * dy_row
    code += job * dy_row
    first = (tl.program_id(0) % TILES) * DEPTH
    channel = (tl.program_id(0) // TILES) * COLUMNS + tl.arange(0, COLUMNS)
    written = channel < OUTS
    total = tl.zeros((DEPTH, COLUMNS), tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, count)
    for turn in range(0, part, ROWS):
        row = begin + turn + tl.arange(0, ROWS)
        live = row < end
        inside = live[:, None] & written[None, :]
        if CELLS:
            image, down, across = _pixel_of_cell(row, 0, HEIGHT, WIDTH)
        elif POOLED:
            image, down, across = _pixel_of_cell(row // 4, row % 4, HEIGHT, WIDTH)
        else:
            image, down, across = _pixel(row, HEIGHT, WIDTH)
        down = down * STRIDE - PAD_DOWN
        across = across * STRIDE - PAD_ALONG
        cell = row // 4 if POOLED and not CELLS else row
        where = cell[:, None] * OUTS + channel[None, :]
        slope = tl.load(dy + where, mask=inside, other=0.0)
        if POOLED:
            passed = tl.load(code + where, mask=inside, other=DEAD)
        for pixel in tl.static_range(4 if CELLS else 1):
            p = _patches(
                x, live, image, down + pixel // 2 * STRIDE, across + pixel % 2 * STRIDE, first,
                IN_HEIGHT, IN_WIDTH, INS, TAPS, ALONG, 1, 1, DEPTH,
            )  # fmt: skip
            g = slope
            if CELLS:
                g = tl.where(passed == pixel, slope, 0.0)
            elif POOLED:
                g = tl.where(passed == (row % 4)[:, None], slope, 0.0)
            total = tl.dot(tl.trans(p), g.to(p.dtype), total, input_precision=PRECISION)
    number = first + tl.arange(0, DEPTH)
    tile = number[:, None] * OUTS + channel[None, :]
    inside = (number < TAPS * INS)[:, None] & written[None, :]
    out += (job * tl.num_programs(1) + tl.program_id(1)) * out_row
    if SUBTRACT:
        total = tl.load(out + tile, mask=inside, other=0.0) - total
    tl.store(out + tile, total, mask=inside)


@triton.jit
def _slab(
    turn, start, group, pixels, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Where the next pixels of a group lie, and which exist."""
    row = turn * ROWS + tl.arange(0, ROWS)
    number = tl.arange(0, SIDE)
    where = start + row[:, None] * CHANNELS + (group * WIDTH + number)[None, :]
    return where, (row < pixels)[:, None] & (number < WIDTH)[None, :]


@triton.jit
def group_norm(
    z, residual, scale, shift, y, mean, rate, scale_row, batch, pixels, eps,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, SUMMED: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Group normalisation of one group of one sample, plus a residual, perhaps with ReLU.

    Keeps the mean and the reciprocal of the standard deviation. A group is read three times, but
    from memory only once: it stays in the cache.
    """
    sample = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    number = tl.arange(0, SIDE)
    channel = group * WIDTH + number
    start = sample * pixels * CHANNELS
    total = tl.zeros((ROWS, SIDE), tl.float32)
    for turn in range(TURNS):
        where, inside = _slab(turn, start, group, pixels, CHANNELS, WIDTH, SIDE, ROWS)
        total += tl.load(z + where, mask=inside, other=0.0).to(tl.float32)
    count = pixels * WIDTH
    middle = tl.sum(tl.sum(total, axis=1), axis=0) / count
    total = tl.zeros((ROWS, SIDE), tl.float32)
    for turn in range(TURNS):
        where, inside = _slab(turn, start, group, pixels, CHANNELS, WIDTH, SIDE, ROWS)
        far = tl.load(z + where, mask=inside, other=0.0).to(tl.float32) - middle
        total += tl.where(inside, far * far, 0.0)
    inverse = 1 / tl.sqrt_rn(tl.sum(tl.sum(total, axis=1), axis=0) / count + eps)
    at = sample * tl.num_programs(1) + group
    tl.store(mean + at, middle)
    tl.store(rate + at, inverse)
    own = sample // batch * scale_row + channel
    factor = tl.load(scale + own, mask=number < WIDTH, other=0.0)
    offset = tl.load(shift + own, mask=number < WIDTH, other=0.0)
    for turn in range(TURNS):
        where, inside = _slab(turn, start, group, pixels, CHANNELS, WIDTH, SIDE, ROWS)
        value = tl.load(z + where, mask=inside, other=0.0).to(tl.float32)
        value = (value - middle) * inverse * factor[None, :] + offset[None, :]
        if SUMMED:
            value += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            value = tl.maximum(value, 0.0)
        tl.store(y + where, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def group_norm_backward(
    dy, y, z, scale, mean, rate, dz, through, dscale, dshift, scale_row, batch, pixels,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, SUMMED: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Gradients before `group_norm`; those of scale and shift sample by sample."""
    sample = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    number = tl.arange(0, SIDE)
    channel = group * WIDTH + number
    start = sample * pixels * CHANNELS
    at = sample * tl.num_programs(1) + group
    middle = tl.load(mean + at)
    inverse = tl.load(rate + at)
    along = tl.zeros((ROWS, SIDE), tl.float32)
    common = tl.zeros((ROWS, SIDE), tl.float32)
    for turn in range(TURNS):
        where, inside = _slab(turn, start, group, pixels, CHANNELS, WIDTH, SIDE, ROWS)
        slope = tl.load(dy + where, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            slope = tl.where(tl.load(y + where, mask=inside, other=0.0) > 0, slope, 0.0)
        value = tl.load(z + where, mask=inside, other=0.0).to(tl.float32)
        along += slope * (value - middle) * inverse
        common += slope
    own = sample // batch * scale_row + channel
    factor = tl.load(scale + own, mask=number < WIDTH, other=0.0)
    along_channel = tl.sum(along, axis=0)
    common_channel = tl.sum(common, axis=0)
    place = sample * CHANNELS + channel
    tl.store(dscale + place, along_channel, mask=number < WIDTH)
    tl.store(dshift + place, common_channel, mask=number < WIDTH)
    count = pixels * WIDTH
    along_group = tl.sum(along_channel * factor, axis=0) / count
    common_group = tl.sum(common_channel * factor, axis=0) / count
    for turn in range(TURNS):
        where, inside = _slab(turn, start, group, pixels, CHANNELS, WIDTH, SIDE, ROWS)
        slope = tl.load(dy + where, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            slope = tl.where(tl.load(y + where, mask=inside, other=0.0) > 0, slope, 0.0)
        if SUMMED:
            tl.store(through + where, slope.to(through.dtype.element_ty), mask=inside)
        value = tl.load(z + where, mask=inside, other=0.0).to(tl.float32)
        standard = (value - middle) * inverse
        slope = (slope * factor[None, :] - common_group - standard * along_group) * inverse
        tl.store(dz + where, slope.to(dz.dtype.element_ty), mask=inside)


@triton.jit
def _matrix(x, i, j, rows, columns, row_size, column_size):
    """Elements ``[i, j]`` of a matrix, 0 outside; where they lie, and which exist."""
    where = i[:, None] * row_size + j[None, :] * column_size
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(x + where, mask=inside, other=0.0), where, inside


@triton.jit
def dense(
    a, b, bias, out, a_row, b_row, bias_row, out_row, rows, columns, inner: tl.constexpr,
    a_down, a_along, b_down, b_along, out_down, out_along, BIASED: tl.constexpr,
    RELU: tl.constexpr, SUBTRACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``a b``, plus a bias for each row, perhaps with ReLU; or ``out −= a b``. A tile per program.

    Products of a weight, which is `a`, are computed in the type of the batch.
    """
    job = tl.program_id(2).to(tl.int64)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    out += job * out_row + i[:, None] * out_down + j[None, :] * out_along
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    if SUBTRACT:  # asked for first, since it takes longest
        before = tl.load(out, mask=inside, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, inner, DEPTH):
        k = first + tl.arange(0, DEPTH)
        p, _, _ = _matrix(a + job * a_row, i, k, rows, inner, a_down, a_along)
        q, _, _ = _matrix(b + job * b_row, k, j, inner, columns, b_down, b_along)
        total = tl.dot(p.to(q.dtype), q, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + job * bias_row + i, mask=i < rows, other=0.0)[:, None]
    if RELU:
        total = tl.maximum(total, 0.0)
    if SUBTRACT:
        total = before - total
    tl.store(out, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _move(rows, received, where, inside, value, change, pull, PROXIMAL: tl.constexpr):
    """Gradient descent, with a pull to the received weights."""
    if PROXIMAL:
        value += pull * (tl.load(received + where, mask=inside, other=0.0) - value)
    tl.store(rows + where, value - change, mask=inside)


@triton.jit
def mlp_step(
    inputs, targets, samples, rows, received, start, steps, last_epoch, rate, proximal, count, loss,
    row_size, table, batch, channels, hidden, features: tl.constexpr, classes, weight1, bias1,
    weight2, bias2, weight3, bias3, BATCH: tl.constexpr, IN: tl.constexpr, HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr, CLASSES: tl.constexpr, PROXIMAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A local step of a model of two dense layers and a head, one job per program.

    The second layer is computed in chunks of its units, forward and then again backward, where
    each chunk is updated as soon as it has been used. Weights are read transposed.
    """
    job = tl.program_id(0).to(tl.int64)
    number = tl.load(count)
    busy = number < tl.load(steps + job)
    pace = tl.where(busy, tl.load(rate + job), 0.0)
    pull = pace * tl.load(proximal + job)
    sample = tl.arange(0, BATCH)
    at = tl.minimum(tl.load(start + job) + number * batch + sample, table - 1)
    index = tl.load(samples + at, mask=sample < batch, other=-1)
    live = tl.where(busy, index, -1) >= 0
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
    w1, _at1, _in1 = _matrix(rows + weight1, channel, unit, channels, hidden, 1, channels)
    b1 = tl.load(rows + bias1 + unit, mask=unit < hidden, other=0.0)
    h1 = tl.maximum(tl.dot(x, w1, input_precision=PRECISION) + b1[None, :], 0.0)
    b3 = tl.load(rows + bias3 + kind, mask=kind < classes, other=0.0)
    z = tl.zeros((BATCH, CLASSES), tl.float32) + b3[None, :]
    for first in range(0, features, CHUNK):
        part = first + tl.arange(0, CHUNK)
        w2, _, _ = _matrix(rows + weight2, unit, part, hidden, features, 1, hidden)
        w3, _, _ = _matrix(rows + weight3, part, kind, features, classes, 1, features)
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
        w2, at2, in2 = _matrix(rows + weight2, unit, part, hidden, features, 1, hidden)
        w3, at3, in3 = _matrix(rows + weight3, part, kind, features, classes, 1, features)
        b2 = tl.load(rows + bias2 + part, mask=part < features, other=0.0)
        h2 = tl.maximum(tl.dot(h1, w2, input_precision=PRECISION) + b2[None, :], 0.0)
        d2 = tl.where(h2 > 0, tl.dot(dz, tl.trans(w3), input_precision=PRECISION), 0.0)
        d1 = tl.dot(d2, tl.trans(w2), d1, input_precision=PRECISION)
        dw3 = tl.dot(tl.trans(h2), dz, input_precision=PRECISION)
        dw2 = tl.dot(tl.trans(h1), d2, input_precision=PRECISION)
        _move(rows, received, weight3 + at3, in3, w3, dw3, pull, PROXIMAL)
        _move(rows, received, weight2 + at2, in2, w2, dw2, pull, PROXIMAL)
        db2 = tl.sum(d2, axis=0)
        _move(rows, received, bias2 + part, part < features, b2, db2, pull, PROXIMAL)
    d1 = tl.where(h1 > 0, d1, 0.0)
    dw1 = tl.dot(tl.trans(x), d1, input_precision=PRECISION)
    # Read again: kept, it would take up the registers all the time.
    w1, at1, in1 = _matrix(rows + weight1, channel, unit, channels, hidden, 1, channels)
    _move(rows, received, weight1 + at1, in1, w1, dw1, pull, PROXIMAL)
    db1 = tl.sum(d1, axis=0)
    _move(rows, received, bias1 + unit, unit < hidden, b1, db1, pull, PROXIMAL)
    db3 = tl.sum(dz, axis=0)
    _move(rows, received, bias3 + kind, kind < classes, b3, db3, pull, PROXIMAL)
