// The sections of what is measured: memory, time, communication, and what is gained for what.

const CATEGORIES = [['parameter_shard', 'parameters'], ['gathered_parameter', 'gathered parameters'], ['gradient', 'gradients'],
                    ['optimizer', 'optimizer'], ['activation', 'activations'], ['communication', 'communication'], ['workspace', 'workspace']];

// Of the plan of a configuration, if the page has its step.
function termsOf(c, key) {
  const step = data.drawn.find((s) => s.name === c.name);
  return step && step[key] ? step[key] : [];
}

function memorySection() {
  const rows = trained.filter((c) => c.peak_bytes);
  if (rows.length === 0) return;
  const parts = (bytes) => CATEGORIES.map(([key, name], i) => ({value: bytes[key] || 0, series: i, name}));
  const listing = (bytes) => CATEGORIES.filter(([key]) => bytes[key] > 0).map(([key, name]) => `${name} ${amount(bytes[key])}`).join(' · ');
  const hosts = rows.some((c) => c.host_peak_bytes && c.host_peak_bytes.total > 0);
  const planned = rows.some((c) => c.planned && c.planned.peak_bytes && known(c.planned.peak_bytes.total));
  const node = section('memory', 'The peak of each category on one rank. Peaks need not fall together: the mark is the most that was in use at one time, '
      + 'and the figure is of that.' + (hosts ? ' The thin bar is memory of the host, where offloaded state lies.' : '')
      + (planned ? '' : ' No plan was recorded, so nothing is shown as planned.'));
  barChart(figureOf(node), rows.map((c) => ({
    label: c.name, segments: parts(c.peak_bytes), thin: c.host_peak_bytes ? parts(c.host_peak_bytes) : null,
    marks: known(c.peak_bytes.total) ? [{value: c.peak_bytes.total, name: 'peak'}] : [], value: amount(c.peak_bytes.total),
    text: listing(c.peak_bytes) + (c.host_peak_bytes && c.host_peak_bytes.total > 0 ? ` · on the host ${amount(c.host_peak_bytes.total)} (${listing(c.host_peak_bytes)})` : '')
        + (c.planned && c.planned.peak_bytes ? ` · planned ${amount(c.planned.peak_bytes.total)}` : ''),
  })), {title: 'Peak memory by category', hint: 'Point at a bar, or use the arrow keys, for its figures.',
        legend: CATEGORIES.filter(([key]) => rows.some((c) => c.peak_bytes[key] > 0 || (c.host_peak_bytes && c.host_peak_bytes[key] > 0)))
            .map(([key, name]) => ({name, color: `var(--c${CATEGORIES.findIndex(([k]) => k === key)})`}))
            .concat([{name: 'peak of all together', color: 'var(--ink)', kind: 'tick'}])});
  const lines = [];
  const seen = new Set();
  for (const c of rows) {
    for (const [category, name] of CATEGORIES.slice(0, 4)) {
      const terms = termsOf(c, 'terms').filter((t) => t.category === category);
      if (terms.length === 0 || terms.length > 6) continue;
      const bytes = terms.reduce((sum, t) => sum + t.bytes, 0);
      const measured = c.peak_bytes[category];
      const line = [name, terms.map((t) => t.text).join(' + '), amount(bytes), amount(measured)];
      const key = c.strategy + line.join('|');
      if (seen.has(key)) continue;
      seen.add(key);
      lines.push([c.name, ...line]);
    }
  }
  if (lines.length > 0) {
    node.append(figures('Why it is so much: the arithmetic of the plan, and what was measured',
                        ['configuration', 'category', 'arithmetic', 'planned', 'measured'], lines, lines.length <= 20));
  }
}

// The arithmetic of each category, whose measured peak stands in its first row. Of many terms the
// smaller ones are folded away.
function termRows(terms, where, measured) {
  const label = Object.fromEntries(CATEGORIES);
  return [...new Set(terms.map((t) => t.category))].flatMap((category) => {
    const own = terms.filter((t) => t.category === category);
    const shown = own.slice(0, own.length > 6 ? 5 : 6), rest = own.slice(shown.length);
    const rows = shown.map((t) => ['', t.text, count(t.bytes), '']);
    if (rest.length > 0) {
      rows.push(['', el('details', {}, el('summary', {}, `${rest.length} smaller terms`),
                        el('ul', {}, ...rest.map((t) => el('li', {}, `${t.text}: ${count(t.bytes)} B`)))),
                 count(rest.reduce((sum, t) => sum + t.bytes, 0)), '']);
    }
    rows[0][0] = (label[category] || category) + where;
    rows[0][3] = measured(category);
    return rows;
  });
}

// One step of a configuration that is picked, and the arithmetic of its plan beside it.
function stepMemorySection() {
  const steps = data.drawn.filter((s) => s.memory && all.some((c) => c.name === s.name));
  if (steps.length === 0) return;
  const node = section('step-memory', 'What is held from moment to moment of one step on one rank, and why: shards, gradients, optimizer state and the slots '
      + 'that parameters are gathered into are held throughout; activations grow through forward and shrink through backward, workspace and messages come and go. '
      + 'All have one scale.');
  const figure = figureOf(node);
  const pick = el('select', {'aria-label': 'configuration'}, ...steps.map((s, i) => el('option', {value: i}, s.name)));
  node.querySelector('.pickers').append(el('label', {}, 'configuration', pick));
  const row = (step) => all.find((c) => c.name === step.name);
  const peakOf = (step) => row(step) && row(step).peak_bytes ? row(step).peak_bytes.total : null;
  const most = Math.max(...steps.flatMap((s) => [...s.memory.total, peakOf(s) || 0])) * 1.04;
  figure.append(legend(CATEGORIES.map(([key, name], i) => ({key, name, color: `var(--c${i})`}))
      .filter(({key}) => steps.some((s) => s.memory.bytes[key] && Math.max(...s.memory.bytes[key]) > 0))
      .concat([{name: 'measured peak', color: 'var(--soft)', kind: 'dash'}])));
  const measured = (step, where, category) => row(step) && row(step)[where] ? count(row(step)[where][category] || 0) : UNKNOWN;
  const holder = el('div');
  const terms = el('div');
  const update = () => {
    const step = steps[pick.selectedIndex];
    const {ms: at, bytes, total} = step.memory;
    const peak = peakOf(step);
    let plot = null;
    const area = el('div', {class: 'explore', role: 'group', 'aria-label': `Memory of ${step.name}`});
    const {readout, go} = explorable(area, at.length, (i, on) => {
      if (plot === null) return;
      plot.cursor.setAttribute('visibility', on ? 'visible' : 'hidden');
      plot.cursor.setAttribute('transform', `translate(${plot.xOf(i)})`);
    }, (i) => [`at ${ms(at[i])}:`, `${amount(total[i])} · ` + CATEGORIES.filter(([key]) => bytes[key] && bytes[key][i] > 0)
        .map(([key, name]) => `${name} ${amount(bytes[key][i])}`).join(' · ')], 'Point at a moment, or use the arrow keys.');
    holder.replaceChildren(area, readout, el('p', {class: 'note'}, (trained.length > steps.length ? `The first ${steps.length} of ${trained.length}. ` : '') + (step.source === 'plan'
        ? 'As planned: books and order are those of the real schedule, time is simulated.' : 'As traced, the last step that was.')
        + ' What a single kernel takes and gives back is in the peak alone.'));
    responsive(area, (width) => {
      plot = stepMemoryPlot(width, step, most, known(peak) ? [{value: peak, name: 'measured peak'}] : []);
      plot.node.addEventListener('pointermove', (event) => go(plot.nearest(event.clientX - plot.node.getBoundingClientRect().left)));
      return plot.node;
    });
    const rows = [...termRows(step.terms || [], '', (category) => measured(step, 'peak_bytes', category)),
                  ...termRows(step.host_terms || [], ', on the host', (category) => measured(step, 'host_peak_bytes', category))];
    terms.replaceChildren(...(rows.length > 0 ? [figures('Why: the arithmetic of the plan',
        ['category', 'arithmetic', 'bytes', 'measured peak'], rows, true)] : []));
  };
  figure.append(holder);
  node.append(terms);
  pick.selectedIndex = steps.length - 1;
  pick.addEventListener('change', update);
  update();
}

// Of the time of a step, and which colour.
const PARTS = [['compute_ms', 'forward and backward', 0], ['exposed_comm_ms', 'exposed communication', 2],
               ['optimizer_ms', 'optimizer', 3], ['data_ms', 'data', 5]];

function timeSection() {
  const rows = trained.filter((c) => known(metric(c, 'step_ms')));
  if (rows.length === 0) return;
  const shown = PARTS.filter(([key]) => rows.some((c) => known(stepPart(c, key))));
  const untold = PARTS.filter((p) => !shown.includes(p)).map(([, name]) => name);
  const rest = untold.length > 0 ? 'not split further' : 'the rest';
  const node = section('time', 'The median step on rank 0, without warm-up, taken apart by what each part takes of the time of all steps. Exposed communication is what computation waited for; hidden communication costs no time here.'
      + (untold.length > 0 ? ` Not measured: ${untold.join(', ')}.` : ''));
  barChart(figureOf(node), rows.map((c) => {
    const step = metric(c, 'step_ms');
    const segments = shown.filter(([key]) => known(stepPart(c, key))).map(([key, name, series]) => ({value: stepPart(c, key), series, name}));
    segments.push({value: Math.max(0, stepPart(c, 'other_ms')), series: 6, name: rest});
    const {q1, q3} = c.metrics.step_ms;
    const overlap = metric(c, 'overlap');
    return {label: c.name, segments, value: ms(step),
            text: `half of all steps took ${short(q1)} to ${ms(q3)} · ` + segments.map((s) => `${s.name} ${ms(s.value)}`).join(' · ')
                + (known(overlap) ? ` · ${Math.round(100 * overlap)} % of communication overlapped` : '')};
  }), {title: 'Where the time of a step goes', hint: 'Point at a bar, or use the arrow keys, for its figures.',
       legend: shown.map(([, name, series]) => ({name, color: `var(--c${series})`})).concat([{name: rest, color: 'var(--c6)'}])});
}

function communicationSection() {
  const planned = (c) => c.planned ? c.planned.sent_bytes : null;
  const rows = trained.filter((c) => known(metric(c, 'sent_bytes')) || known(planned(c)));
  if (rows.length === 0) return;
  const measured = rows.some((c) => known(metric(c, 'sent_bytes')));
  const node = section('communication', 'Bytes that one rank sends in a step. The mark is what was planned.'
      + (measured ? '' : ' What was sent was not measured in these runs, so the marks stand alone.'));
  barChart(figureOf(node), rows.map((c) => {
    const sent = metric(c, 'sent_bytes');
    return {label: c.name, segments: known(sent) ? [{value: sent, series: 0, name: 'measured'}] : [],
            marks: known(planned(c)) ? [{value: planned(c), name: 'planned'}] : [],
            value: known(sent) ? amount(sent) : '≈ ' + amount(planned(c)),
            text: (known(sent) ? `measured ${amount(sent)}` : 'not measured')
                + (known(metric(c, 'num_collectives')) ? ` · ${count(metric(c, 'num_collectives'))} collectives` : '')
                + (known(planned(c)) ? ` · planned ${amount(planned(c))}` : ' · no plan was recorded')};
  }), {title: 'Bytes sent, measured and planned', hint: 'Point at a bar, or use the arrow keys, for its figures.',
       legend: [...(measured ? [{name: 'measured', color: 'var(--c0)'}] : []), {name: 'planned', color: 'var(--ink)', kind: 'tick'}]});
  const lines = rows.flatMap((c) => termsOf(c, 'sent_terms').map((t, i) =>
      [i === 0 ? c.name : '', t.text, count(t.bytes), i === 0 ? amount(planned(c)) : '', i === 0 ? amount(metric(c, 'sent_bytes')) : '']));
  if (lines.length > 0) {
    node.append(figures('Why it is so much: the collectives of the plan',
                        ['configuration', 'collectives', 'bytes', 'planned', 'measured'], lines, lines.length <= 20));
  }
}

function paretoSection() {
  const rows = trained.filter((c) => c.peak_bytes && known(c.peak_bytes.total) && known(metric(c, 'tokens_per_s')));
  if (rows.length < 2) return;
  const front = rows.filter((c) => c.on_pareto_front).sort((a, b) => a.peak_bytes.total - b.peak_bytes.total);
  const node = section('pareto', 'Up and to the left is better. ' + (front.length > 0
      ? `${front.length === 1 ? 'One is' : front.length + ' are'} beaten by no other beyond noise: ` + front.map((c, i) => `${i + 1} ${c.name}`).join('; ') + '.'
      : 'Too few rounds to say which are beaten by no other.'));
  const strategies = [...new Set(rows.map((c) => c.strategy))];
  figureOf(node).append(legend(strategies.map((name, i) => ({name, color: `var(--c${i % 8})`}))
      .concat(front.length > 1 ? [{name: 'Pareto front', color: 'var(--soft)', kind: 'dash'}] : [])));
  let dots = [];
  responsive(figureOf(node), (width) => {
    const plot = paretoPlot(width, rows, front, strategies);
    dots = plot.dots;
    dots.forEach((dot, i) => dot.addEventListener('pointerenter', () => explore.go(i)));
    return plot.node;
  });
  figureOf(node).setAttribute('aria-label', 'Throughput against memory: a dot for each configuration');
  const explore = explorable(figureOf(node), rows.length, (i, on) => dots[i].classList.toggle('active', on),
      (i) => [rows[i].name + ':', `${short(metric(rows[i], 'tokens_per_s'))} tokens/s · ${amount(rows[i].peak_bytes.total)}`
              + (rows[i].on_pareto_front ? ` · number ${front.indexOf(rows[i]) + 1} of the front` : '')], 'Point at a dot, or use the arrow keys.');
  dots.forEach((dot, i) => dot.addEventListener('pointerenter', () => explore.go(i)));
  figureOf(node).append(explore.readout);
}

