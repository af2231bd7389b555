// Streams of one or two steps that are picked, traced or planned, with one scale of time.
function ganttSection() {
  const steps = data.drawn.filter((s) => s.threads.length > 0);
  if (steps.length === 0) return;
  const node = section('gantt', 'What a stream does while compute goes on is hidden. Both steps have one scale of time.');
  const first = data.streams.map((i) => steps.indexOf(data.drawn[i])).filter((i) => i >= 0);
  const labels = steps.length > 1 ? ['above', 'below'] : ['configuration'];
  const picks = labels.map((label, k) => {
    const pick = el('select', {'aria-label': label}, ...steps.map((s, i) => el('option', {value: i}, s.name)));
    if (k === 1) pick.append(el('option', {value: -1}, 'none'));
    pick.selectedIndex = k < first.length ? first[k] : k === 1 ? steps.length : 0;
    return pick;
  });
  node.querySelector('.pickers').append(...picks.map((pick, k) => el('label', {}, labels[k], pick)));
  const holder = el('div');
  figureOf(node).append(holder);
  const update = () => {
    const shown = picks.map((pick) => steps[Number(pick.value)]).filter(known);
    const slices = shown.flatMap((step) => step.threads.flatMap((thread) => thread.slices.map(([begin, duration, name]) =>
        ({step, thread, begin, duration, name: data.slice_names[name]}))));
    let rects = [];
    const area = el('div', {class: 'explore', role: 'group', 'aria-label': 'Streams of ' + shown.map((s) => s.name).join(' and ')});
    const {readout, go} = explorable(area, slices.length, (i, on) => rects[i].classList.toggle('active', on), (i) => {
      const {name, duration, thread, begin, step} = slices[i];
      return [name + ':', `${ms(duration)} on ${thread.name}, from ${ms(begin)} on, ${step.name}`];
    }, 'Point at a slice, or use the arrow keys.');
    const sources = [...new Set(shown.map((s) => s.source))];
    const notes = [sources.includes('plan') ? 'Planned: the launches and messages of the real schedule, in simulated time, '
                       + 'at the rates of --rates.*; with --log.trace=yes it is measured.' : 'Traced: the last step that was, of rank 0.'];
    if (sources.length > 1) notes.push('One was traced and one is planned: their times do not compare.');
    for (const s of shown) if (s.left_out > 0) notes.push(`${count(s.left_out)} of the shortest slices of ${s.name} are left out.`);
    holder.replaceChildren(area, readout, el('p', {class: 'note'}, notes.join(' ')));
    responsive(area, (width) => {
      const plot = ganttPlot(width, shown);
      rects = plot.rects;
      rects.forEach((rect, i) => rect.addEventListener('pointerenter', () => go(i)));
      return plot.node;
    });
  };
  picks.forEach((pick) => pick.addEventListener('change', update));
  update();
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
  const node = svg('svg', {class: 'plot', viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': 'Slices of work by stream: ' + steps.map((s) => `${s.name}, ${ms(s.duration_ms)}`).join('; ')});
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
                       svg('title', {}, `${data.slice_names[name]}: ${ms(duration)}`)));
      }
      top += laneOf;
    }
    top += 14;
  });
  node.append(...rects);
  for (const v of ticks(most, narrow ? 3 : 8).filter((t) => t <= most)) {
    node.append(svg('line', {class: 'axis', x1: x(v), x2: x(v), y1: top - 8, y2: top - 3}),
                text(x(v), top + 12, tickText(v) + (v === 0 ? ' ms' : ''), {'text-anchor': v === 0 ? 'start' : x(v) > width - 20 ? 'end' : 'middle'}));
  }
  return {node, rects};
}

