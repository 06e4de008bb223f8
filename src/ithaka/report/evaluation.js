// Draws losses by position. `runs` are the models; each has rows { from, to, loss, error } under a box's name.
for (const box of document.querySelectorAll("[data-rows]")) {
  // The first row starts at position 1, which is too far left on a logarithmic axis.
  const at = position => Math.log2(position), start = row => Math.max(row.from, row.to / 2);
  const label = ({ from, to, loss, error }) => `${from} to ${to}: ${loss.toPrecision(4)}${error ? " ± " + error.toPrecision(3) : ""}`;
  const steps = rows => rows.map(row => ({ value: [at(start(row)), row.loss], label: label(row) }))
    .concat(rows.slice(-1).map(row => ({ value: [at(row.to), row.loss], label: label(row), symbol: "none" })));
  charts.push({ box, live: null, option: (c, narrow) => ({
    ...base(c, narrow), dataZoom: [], legend: { ...base(c, narrow).legend, show: runs.length > 1 },
    tooltip: { ...base(c, narrow).tooltip, trigger: "item", formatter: ({ seriesName, data }) => echarts.format.encodeHTML(`${seriesName} ${data.label}`) },
    xAxis: axis(c, { type: "value", interval: 1, name: "position (tokens)", min: "dataMin", max: "dataMax", axisLabel: { formatter: n => tokens(Math.round(2 ** n)) } }),
    yAxis: axis(c, { type: "value", scale: true }),
    series: showHidden(runs.map((model, i) => ({
      name: model.name, type: "line", step: "end", data: steps(model[box.dataset.rows].filter(row => row.loss != null)),
      color: RUN_COLOURS[i], symbol: RUN_SYMBOLS[i], symbolSize: 7, lineStyle: { width: 2 },
    }))),
  }) });
}
