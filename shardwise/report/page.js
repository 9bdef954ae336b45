// SPDX-License-Identifier: Apache-2.0
const figures = JSON.parse(document.getElementById('figures').textContent);
const plots = [...document.querySelectorAll('.plot')];
const colour = (what) => getComputedStyle(document.querySelector(what)).color;
const config = {
  responsive: true, displaylogo: false, displayModeBar: 'hover', modeBarButtons: [['toImage']],
  toImageButtonOptions: {format: 'svg'},
};
function draw(at) {
  const ink = colour('body'), faint = colour('header p, figcaption span');
  const frame = getComputedStyle(plots[at].parentNode);
  const layout = structuredClone(figures[at].layout), line = frame.borderTopColor;
  for (const axis of [layout.xaxis, layout.yaxis])
    Object.assign(axis, {gridcolor: line, linecolor: line, zeroline: false, automargin: true, nticks: axis.type === 'log' ? 5 : 0});
  Object.assign(layout, {
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', margin: {l: 56, r: 16, t: 8, b: 44},
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: faint},
    legend: {orientation: 'h', y: 1, yanchor: 'bottom', x: 0, font: {color: ink}},
    hoverlabel: {bgcolor: frame.backgroundColor, bordercolor: line, font: {color: ink}},
    modebar: {bgcolor: 'rgba(0,0,0,0)', color: line, activecolor: faint},
    uirevision: figures[at].view || 0,
  });
  Plotly.react(plots[at], figures[at].data, layout, config);
}
const drawAll = () => plots.forEach((_, at) => draw(at));
plots.forEach((plot, at) => plot.parentNode.querySelectorAll('[data-axis]').forEach((button) => {
  const axis = figures[at].layout[button.dataset.axis];
  button.classList.toggle('on', axis.type === 'log');
  button.addEventListener('click', () => {
    axis.type = axis.type === 'log' ? 'linear' : 'log';
    button.classList.toggle('on', axis.type === 'log');
    figures[at].view = (figures[at].view || 0) + 1;  // the old zoom has another meaning
    draw(at);
  });
}));
const system = matchMedia('(prefers-color-scheme: dark)');
document.getElementById('theme').addEventListener('click', () => {
  const root = document.documentElement, set = root.style.colorScheme;
  root.style.colorScheme = (set ? set === 'dark' : system.matches) ? 'light' : 'dark';
  drawAll();
});
system.addEventListener('change', drawAll);
drawAll();
