// The search of the site, by its own worker: node site_search.js SITE < queries (JSON) > pages (JSON).
// Pages are the first ones that the search shows for each query, best first.
const fs = require("fs");
const path = require("path");

const site = process.argv[2];
const folder = path.join(site, "assets/javascripts/workers");
const [worker] = fs.readdirSync(folder).filter((name) => /^search\.\w+\.min\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
const answers = [];
let receive;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => (receive = listener);
globalThis.postMessage = (message) => answers.shift()(message);
(0, eval)(fs.readFileSync(path.join(folder, worker), "utf8"));

const ask = (message) =>
  new Promise((resolve) => {
    answers.push(resolve);
    receive({ data: message });
  });

(async () => {
  await ask({ type: 0, data: { ...index, options: { suggest: true } } });
  const found = [];
  for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const { data } = await ask({ type: 2, data: query });
    found.push(data.items.slice(0, 5).map(([first]) => first.location.split("#")[0]));
  }
  console.log(JSON.stringify(found));
})();
