import { createHash } from "node:crypto";
import { readFileSync, readdirSync, statSync, writeFileSync } from "node:fs";
import { join, relative, resolve } from "node:path";
import { defineConfig, type Plugin } from "vite";

const root = import.meta.dirname;
const out = resolve(root, "../src/midstream/server/studio");
const SOURCES = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "src"];

function filesOf(path: string): string[] {
  return statSync(path).isDirectory()
    ? readdirSync(path).flatMap((name) => filesOf(join(path, name)))
    : [path];
}

function sha256(...parts: (string | Buffer)[]): string {
  const hash = createHash("sha256");
  for (const part of parts) hash.update(part);
  return hash.digest("hex");
}

/** Records the hash of the sources and of each built file, which a test compares with the files. */
function record(): Plugin {
  return {
    name: "record",
    closeBundle() {
      const sources = SOURCES.flatMap((name) => filesOf(join(root, name)))
        .map((path) => ({ name: relative(root, path).replaceAll("\\", "/"), path }))
        .sort((a, b) => (a.name < b.name ? -1 : 1));
      const lines = sources.map(({ name, path }) => `${sha256(readFileSync(path))}  ${name}\n`);
      const built = ["index.html", "studio.css", "studio.js"];
      const files = Object.fromEntries(built.map((name) => [name, sha256(readFileSync(join(out, name)))]));
      writeFileSync(join(out, "build.json"), `${JSON.stringify({ sources: sha256(...lines), files }, null, 2)}\n`);
    },
  };
}

export default defineConfig({
  base: "./",
  build: {
    outDir: out,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "studio.js",
        assetFileNames: "studio.[ext]",
        inlineDynamicImports: true,
      },
    },
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8000" } },
  plugins: [record()],
});
