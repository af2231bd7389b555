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

// Of the baseline, and of other trainings.
function lossPlot(width, trainings) {
  const {node, inner} = frame(width, 250, {left: 46, right: 14, top: 10, bottom: 42});
  node.setAttribute('aria-label', 'Loss by step');
  const finite = trainings.flatMap((points) => points.loss).filter(known);
  let [low, high] = finite.length > 0 ? [Math.min(...finite), Math.max(...finite)] : [0, 0];
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const y = (v) => inner.bottom - 6 - (v - low) / (high - low) * (inner.bottom - inner.top - 16);
  for (const v of ticksBetween(low, high, 4)) {
    node.append(svg('line', {class: 'grid', x1: inner.left, x2: inner.right, y1: y(v), y2: y(v)}),
                text(inner.left - 7, y(v) + 4, tickText(v), {'text-anchor': 'end'}));
  }
  const longest = trainings.reduce((a, b) => b.step.at(-1) > a.step.at(-1) ? b : a);
  const x = stepAxis(node, inner, longest.step);
  trainings.forEach(({step, loss}, i) => {
    node.append(svg('path', {class: 'line l' + i, d: path(step.map((s, j) => known(loss[j]) ? [x(s), y(loss[j])] : null))}));
  });
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
  const [unit, size] = byteUnit(Math.max(...rows.map((c) => c.peak_bytes.total)));
  const bytes = (c) => c.peak_bytes.total / size, speed = (c) => metric(c, 'tokens_per_s');
  const span = (values) => {
    const low = Math.min(...values), high = Math.max(...values), room = (high - low || high || 1) * 0.12;
    return [Math.max(0, low - room), high + room];
  };
  const [x0, x1] = span(rows.map(bytes)), [y0, y1] = span(rows.map(speed));
  const x = (v) => inner.left + (v - x0) / (x1 - x0) * (inner.right - inner.left);
  const y = (v) => inner.bottom - (v - y0) / (y1 - y0) * (inner.bottom - inner.top);
  for (const v of ticksBetween(y0, y1, 5)) {
    node.append(svg('line', {class: 'grid', x1: inner.left, x2: inner.right, y1: y(v), y2: y(v)}),
                text(inner.left - 7, y(v) + 4, tickText(v), {'text-anchor': 'end'}));
  }
  for (const v of ticksBetween(x0, x1, Math.max(3, Math.floor(width / 130)))) {
    node.append(svg('line', {class: 'grid', x1: x(v), x2: x(v), y1: inner.top, y2: inner.bottom}),
                text(x(v), inner.bottom + 17, tickText(v), {'text-anchor': 'middle'}));
  }
  node.append(svg('line', {class: 'axis', x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom}),
              text((inner.left + inner.right) / 2, inner.bottom + 36, `peak memory of a rank, ${unit}`, {'text-anchor': 'middle'}),
              text(6, 13, 'tokens/s'));
  // Those that noise alone keeps on the front lie below the line.
  const line = front.filter((c, i) => front.slice(0, i).every((other) => speed(other) < speed(c)));
  node.append(svg('path', {class: 'front', d: path(line.map((c) => [x(bytes(c)), y(speed(c))]))}));
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

// Memory over one step, categories stacked. From each moment on it is what the books say.
function stepMemoryPlot(width, step, most, marks) {
  const {node, inner} = frame(width, Math.max(230, Math.min(330, width * 0.34)), {left: 62, right: 14, top: 12, bottom: 44});
  node.setAttribute('aria-label', `Memory of ${step.name} over one step`);
  const {ms: at, bytes, total} = step.memory;
  const end = Math.max(step.duration_ms, 1e-9);
  const x = (v) => inner.left + Math.min(v / end, 1) * (inner.right - inner.left);
  const y = (v) => inner.bottom - v / most * (inner.bottom - inner.top);
  const [unit, size] = byteUnit(most);
  for (const v of ticks(most / size, 4).filter((t) => t * size <= most)) {
    node.append(svg('line', {class: 'grid', x1: inner.left, x2: inner.right, y1: y(v * size), y2: y(v * size)}),
                text(inner.left - 7, y(v * size) + 4, tickText(v), {'text-anchor': 'end'}));
  }
  node.append(text(4, 10, unit));
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
  for (const v of ticks(end, width < 560 ? 3 : 7).filter((t) => t <= end)) node.append(text(x(v), inner.bottom + 17, tickText(v), {'text-anchor': 'middle'}));
  node.append(text((inner.left + inner.right) / 2, inner.bottom + 35, step.source === 'plan' ? 'ms of one step, simulated' : 'ms of one step', {'text-anchor': 'middle'}));
  const cursor = svg('line', {class: 'cursor', x1: 0, x2: 0, y1: inner.top, y2: inner.bottom, visibility: 'hidden'});
  node.append(cursor);
  const nearest = (px) => at.reduce((best, v, i) => x(v) <= px ? i : best, 0);
  return {node, cursor, xOf: (i) => x(at[i]), nearest};
}
