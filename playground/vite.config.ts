import { fileURLToPath } from "node:url";
import { defineConfig } from "vitest/config";

const server = process.env.UNMASK_SERVER ?? "http://127.0.0.1:8000";

export default defineConfig({
  base: "./", // the server may stand behind a path of a proxy
  build: {
    outDir: fileURLToPath(new URL("../unmask/serving/static", import.meta.url)),
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false }, // an inline script, which the server's content security policy forbids
    assetsInlineLimit: 0, // fonts stay files: data: addresses are forbidden too
    license: { fileName: "licenses.md" },
  },
  server: { proxy: { "/v1": server, "/health": server } },
  test: { environment: "happy-dom", include: ["tests/**/*.test.ts"], isolate: false, fileParallelism: false },
});
