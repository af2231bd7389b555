// Plots with axes. Each returns what is drawn for a width in pixels.

function frame(width, height, margin) {
  const node = svg('svg', {class: 'plot', viewBox: `0 0 ${width} ${height}`, height, role: 'img'});
  const inner = {left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom};
  return {node, inner};
}

function stepAxis(node, inner, steps) {
  const first = steps[0], last = steps[steps.length - 1];
  const x = (step) => first === last ? (inner.left + inner.right) / 2
                                     : inner.left + (step - first) / (last - first) * (inner.right - inner.left);
  node.append(svg('line', {class: 'axis', x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom}));
  const count = Math.max(2, Math.min(7, Math.floor((inner.right - inner.left) / 60)));
  const shown = new Set([first, ...ticks(last, count).filter((t) => Number.isInteger(t) && t > first && t < last), last]);
  let previous = -Infinity;
  for (const step of shown) {
    if (step !== last && (x(step) - previous < 34 || (step !== first && x(last) - x(step) < 34))) continue;
    previous = x(step);
    node.append(text(x(step), inner.bottom + 17, String(step), {'text-anchor': 'middle'}));
  }
  node.append(text((inner.left + inner.right) / 2, inner.bottom + 34, 'step', {'text-anchor': 'middle'}));
  return x;
}

function path(points) {
  let d = '';
  let open = false;
  for (const point of points) {
    if (point === null) open = false;
    else {
      d += (open ? 'L' : 'M') + point[0].toFixed(1) + ' ' + point[1].toFixed(1);
      open = true;
    }
  }
  return d;
}

function lossPlot(width, points) {
  const {node, inner} = frame(width, 250, {left: 46, right: 14, top: 10, bottom: 42});
  node.setAttribute('aria-label', 'Loss of the baseline by step');
  const finite = points.loss.filter(known);
  let [low, high] = finite.length > 0 ? [Math.min(...finite), Math.max(...finite)] : [0, 0];
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const y = (v) => inner.bottom - 6 - (v - low) / (high - low) * (inner.bottom - inner.top - 16);
  for (let i = 0; i <= 3; ++i) {
    const v = low + (high - low) * i / 3;
    node.append(svg('line', {class: 'grid', x1: inner.left, x2: inner.right, y1: y(v), y2: y(v)}),
                text(inner.left - 7, y(v) + 4, v.toFixed(high - low < 0.3 ? 3 : 2), {'text-anchor': 'end'}));
  }
  const x = stepAxis(node, inner, points.step);
  node.append(svg('path', {class: 'line l0', d: path(points.step.map((s, i) => known(points.loss[i]) ? [x(s), y(points.loss[i])] : null))}));
  return node;
}

// A difference of exactly 0 has no logarithm: it has a lane of its own below the scale.
function differencePlot(width, steps, shown, exact, series) {
  const {node, inner} = frame(width, 250, {left: 70, right: 14, top: 10, bottom: 42});
  node.setAttribute('aria-label', 'Difference of the loss to the baseline by step, on a log scale');
  const lane = inner.bottom - 14;
  const values = shown.flatMap((c) => c.loss_points.difference).filter((d) => known(d) && d > 0);
  const usesTolerance = data.tolerance > 0 && shown.some((c) => c.parity.changes_arithmetic.length > 0);
  if (usesTolerance) values.push(data.tolerance);
  const top = values.length > 0 ? Math.ceil(Math.log10(Math.max(...values))) : 0;
  const bottom = values.length > 0 ? Math.min(Math.floor(Math.log10(Math.min(...values))), top - 1) : -8;
  const y = (v) => lane - 26 - (Math.log10(v) - bottom) / (top - bottom) * (lane - 26 - inner.top - 4);
  const stride = Math.max(1, Math.ceil((top - bottom) / 6));
  for (let e = bottom; e <= top; e += stride) {
    node.append(svg('line', {class: 'grid', x1: inner.left, x2: inner.right, y1: y(10 ** e), y2: y(10 ** e)}),
                text(inner.left - 7, y(10 ** e) + 4, '1e' + e, {'text-anchor': 'end'}));
  }
  node.append(text(inner.left - 7, lane + 4, 'exactly 0', {'text-anchor': 'end'}));
  const x = stepAxis(node, inner, steps);
  node.append(svg('line', {class: 'grid', x1: inner.left, x2: inner.right, y1: lane, y2: lane}));
  if (exact > 0) {
    node.append(svg('line', {class: 'line l4', x1: x(steps[0]) - 2, x2: x(steps[steps.length - 1]) + 2, y1: lane, y2: lane, 'stroke-width': 4}));
    for (const step of steps.length <= 60 ? steps : []) {
      node.append(svg('circle', {class: 's4', cx: x(step), cy: lane, r: 3.5, 'data-name': 'exactly 0', 'data-value': 0}));
    }
  }
  if (usesTolerance) {
    node.append(svg('line', {class: 'front', x1: inner.left, x2: inner.right, y1: y(data.tolerance), y2: y(data.tolerance)}));
  }
  shown.forEach((c, i) => {
    const {step, difference} = c.loss_points;
    const at = (j) => difference[j] > 0 ? y(difference[j]) : lane;
    node.append(svg('path', {class: 'line l' + series(i), d: path(step.map((s, j) => known(difference[j]) ? [x(s), at(j)] : null))}));
    if (step.length > 60) return;
    step.forEach((s, j) => {
      if (!known(difference[j])) return;
      node.append(svg('circle', {class: 's' + series(i), cx: x(s), cy: at(j), r: 3, 'data-name': 'difference', 'data-value': difference[j]}));
    });
  });
  return node;
}

function paretoPlot(width, rows, front, strategies) {
  const {node, inner} = frame(width, Math.max(300, Math.min(420, width * 0.5)), {left: 58, right: 22, top: 26, bottom: 46});
  node.setAttribute('aria-label', 'Throughput against peak memory');
  const bytes = (c) => c.peak_bytes.total / MIB, speed = (c) => metric(c, 'tokens_per_s');
  const span = (values) => {
    const low = Math.min(...values), high = Math.max(...values), room = (high - low || high || 1) * 0.12;
    return [Math.max(0, low - room), high + room];
  };
  const [x0, x1] = span(rows.map(bytes)), [y0, y1] = span(rows.map(speed));
  const x = (v) => inner.left + (v - x0) / (x1 - x0) * (inner.right - inner.left);
  const y = (v) => inner.bottom - (v - y0) / (y1 - y0) * (inner.bottom - inner.top);
  const between = (low, high, count) => {
    const step = ticks(high - low, count)[1];
    const result = [];
    for (let v = Math.ceil(low / step) * step; v <= high; v += step) result.push(Number(v.toPrecision(12)));
    return result;
  };
  for (const v of between(y0, y1, 5)) {
    node.append(svg('line', {class: 'grid', x1: inner.left, x2: inner.right, y1: y(v), y2: y(v)}),
                text(inner.left - 7, y(v) + 4, v >= 10000 ? short(v / 1000) + 'k' : String(v), {'text-anchor': 'end'}));
  }
  for (const v of between(x0, x1, Math.max(3, Math.floor(width / 130)))) {
    node.append(svg('line', {class: 'grid', x1: x(v), x2: x(v), y1: inner.top, y2: inner.bottom}),
                text(x(v), inner.bottom + 17, String(v), {'text-anchor': 'middle'}));
  }
  node.append(svg('line', {class: 'axis', x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom}),
              text((inner.left + inner.right) / 2, inner.bottom + 36, 'peak memory of a rank, MiB', {'text-anchor': 'middle'}),
              text(6, 13, 'tokens/s'));
  node.append(svg('path', {class: 'front', d: path(front.map((c) => [x(bytes(c)), y(speed(c))]))}));
  const dots = rows.map((c) => svg('circle', {class: `dot ${c.on_pareto_front ? 'of-front l' : 's'}${strategies.indexOf(c.strategy) % 8}`,
                                               cx: x(bytes(c)), cy: y(speed(c)), r: c.on_pareto_front ? 9 : 5.5, 'data-name': c.name},
                                  svg('title', {}, c.name)));
  node.append(...dots.filter((_, i) => !rows[i].on_pareto_front), ...front.map((c) => dots[rows.indexOf(c)]));
  // A number stands in its dot; beside it where another dot of the front is as near.
  const at = (c) => [x(bytes(c)), y(speed(c))];
  const isFar = ([ax, ay], others, distance) => others.every(([bx, by]) => Math.hypot(bx - ax, by - ay) > distance);
  const beside = [];
  front.forEach((c, i) => {
    const [cx, cy] = at(c);
    const others = [...front.filter((other) => other !== c).map(at), ...beside];
    const places = [16, 24, 32].flatMap((far) => [[0, -1], [-1, 0], [0.7, -0.7], [-0.7, -0.7], [1, 0], [0.7, 0.7], [-0.7, 0.7], [0, 1]]
        .map(([dx, dy]) => [cx + far * dx, cy + far * dy]));
    const place = isFar([cx, cy], others, 13) ? null : places.find((p) => isFar(p, others, 15) && isFar(p, rows.map(at), 13));
    if (place) beside.push(place);
    const [px, py] = place || [cx, cy];
    node.append(text(px, py + 4, String(i + 1), {'text-anchor': 'middle', class: 'number'}));
  });
  return {node, dots};
}

// Streams of one or two steps, traced or planned, all with one scale of time.
function ganttSection() {
  const steps = data.streams || [];
  if (steps.length === 0) return;
  const planned = steps.some((s) => s.source === 'plan');
  const node = section('gantt', (steps.length > 1 ? `${steps[0].name} above ${steps[1].name}, with one scale of time` : steps[0].name)
      + ': what a stream does while compute goes on is hidden. '
      + (planned ? 'No trace was taken, so this is what is planned: the launches and messages of the real schedule, in simulated time'
                   + ' (100 GFLOP/s, 10 GB/s of memory and between ranks). With --log.trace=yes it is measured.'
                 : 'The last traced step of rank 0.'));
  const all = steps.flatMap((step) => step.threads.flatMap((thread) => thread.slices.map(([begin, duration, name]) => ({step, thread, begin, duration, name}))));
  let rects = [];
  const {readout, go} = explorable(figureOf(node), all.length, (i, on) => rects[i].classList.toggle('active', on),
      (i) => [all[i].name + ':', `${ms(all[i].duration)} on ${all[i].thread.name}, from ${ms(all[i].begin)} on, ${all[i].step.name}`],
      'Point at a slice, or use the arrow keys.');
  responsive(figureOf(node), (width) => {
    const plot = ganttPlot(width, steps);
    rects = plot.rects;
    rects.forEach((rect, i) => rect.addEventListener('pointerenter', () => go(i)));
    return plot.node;
  });
  figureOf(node).append(readout);
  if (steps.some((s) => s.left_out > 0)) {
    figureOf(node).append(el('p', {class: 'note'}, steps.filter((s) => s.left_out > 0)
        .map((s) => `${s.left_out} of the shortest slices of ${s.name} are left out`).join('; ') + '.'));
  }
}

// Lines of at most `most` characters, unless a word has more.
function inLines(words, most) {
  const lines = [];
  for (const word of words.split(' ')) {
    const last = lines.length - 1;
    if (last >= 0 && lines[last].length + 1 + word.length <= most) lines[last] += ' ' + word;
    else lines.push(word);
  }
  return lines;
}

function ganttPlot(width, steps) {
  const lane = 26, narrow = width < 560;
  const left = narrow ? 8 : 130;
  const most = Math.max(...steps.map((s) => s.duration_ms));
  const laneOf = narrow ? lane + 16 : lane;
  const titles = steps.map((s) => inLines(`${s.name}: ${ms(s.duration_ms)}${s.source === 'plan' ? ', planned' : ''}`, width / 8.5));
  const height = steps.reduce((sum, s, i) => sum + 12 + 18 * titles[i].length + s.threads.length * laneOf + 14, 0) + 30;
  const node = svg('svg', {class: 'plot', viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': 'Slices of work by stream'});
  const x = (v) => left + v / most * (width - left - 10);
  const names = [...new Set(steps.flatMap((s) => s.threads.map((t) => t.name)))];  // a stream keeps its colour
  const rects = [];
  let top = 0;
  steps.forEach((step, i) => {
    titles[i].forEach((line, j) => node.append(text(0, top + 18 + 18 * j, line, {class: 'title'})));
    top += 12 + 18 * titles[i].length;
    for (const thread of step.threads) {
      if (narrow) node.append(text(8, top + 11, thread.name, {class: 'name'}));
      else node.append(text(left - 10, top + 16, thread.name, {'text-anchor': 'end', class: 'name'}));
      const at = narrow ? top + 16 : top;
      node.append(svg('rect', {class: 'track', x: left, y: at + 2, width: width - left - 10, height: lane - 6, rx: 3}));
      for (const [begin, duration, name] of thread.slices) {
        rects.push(svg('rect', {class: 's' + names.indexOf(thread.name) % 8, x: x(begin), y: at + 2,
                                width: Math.max(0.7, x(begin + duration) - x(begin) - 0.3), height: lane - 6, rx: 1.5,
                                'fill-opacity': 0.88, 'data-name': 'slice', 'data-value': duration},
                       svg('title', {}, `${name}: ${ms(duration)}`)));
      }
      top += laneOf;
    }
    top += 14;
  });
  node.append(...rects);
  for (const v of ticks(most, narrow ? 3 : 8).filter((t) => t <= most)) {
    node.append(svg('line', {class: 'axis', x1: x(v), x2: x(v), y1: top - 8, y2: top - 3}),
                text(x(v), top + 12, short(v) + (v === 0 ? ' ms' : ''), {'text-anchor': v === 0 ? 'start' : x(v) > width - 20 ? 'end' : 'middle'}));
  }
  return {node, rects};
}

// Memory over one step, categories stacked. From each moment on it is what the books say.
function stepMemoryPlot(width, step, most, marks) {
  const {node, inner} = frame(width, Math.max(230, Math.min(330, width * 0.34)), {left: 62, right: 14, top: 12, bottom: 44});
  node.setAttribute('aria-label', `Memory of ${step.name} over one step`);
  const {ms: at, bytes, total} = step.memory;
  const end = Math.max(step.duration_ms, 1e-9);
  const x = (v) => inner.left + Math.min(v / end, 1) * (inner.right - inner.left);
  const y = (v) => inner.bottom - v / most * (inner.bottom - inner.top);
  for (const v of ticks(most / MIB, 4).filter((t) => t * MIB <= most)) {
    node.append(svg('line', {class: 'grid', x1: inner.left, x2: inner.right, y1: y(v * MIB), y2: y(v * MIB)}),
                text(inner.left - 7, y(v * MIB) + 4, short(v), {'text-anchor': 'end'}));
  }
  node.append(text(4, 10, 'MiB'));
  const below = at.map(() => 0);
  CATEGORIES.forEach(([key, name], series) => {
    const values = bytes[key];
    if (!values || Math.max(...values) === 0) return;
    const lower = [...below];
    values.forEach((v, i) => { below[i] += v; });
    const edge = (heights) => heights.flatMap((h, i) => [[x(at[i]), y(h)], [i + 1 < at.length ? x(at[i + 1]) : x(end), y(h)]]);
    const d = path(edge(below)) + 'L' + edge(lower).reverse().map((p) => p[0].toFixed(1) + ' ' + p[1].toFixed(1)).join('L') + 'Z';
    node.append(svg('path', {class: 's' + series, d, 'fill-opacity': 0.9, 'data-name': name, 'data-value': Math.max(...values)}));
  });
  node.dataset.name = 'most at one time';
  node.dataset.value = Math.max(...total);
  for (const {value, name} of marks) {
    node.append(svg('line', {class: 'front', x1: inner.left, x2: inner.right, y1: y(value), y2: y(value), 'data-name': name, 'data-value': value}));
  }
  node.append(svg('line', {class: 'axis', x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom}));
  for (const v of ticks(end, width < 560 ? 3 : 7).filter((t) => t <= end)) node.append(text(x(v), inner.bottom + 17, short(v), {'text-anchor': 'middle'}));
  node.append(text((inner.left + inner.right) / 2, inner.bottom + 35, step.source === 'plan' ? 'ms of one step, simulated' : 'ms of one step', {'text-anchor': 'middle'}));
  const cursor = svg('line', {class: 'cursor', x1: 0, x2: 0, y1: inner.top, y2: inner.bottom, visibility: 'hidden'});
  node.append(cursor);
  const nearest = (px) => at.reduce((best, v, i) => x(v) <= px ? i : best, 0);
  return {node, cursor, xOf: (i) => x(at[i]), nearest};
}
