/** Animated pictures: their texts are drawn here, where the fonts are. */

import { BOX, CHARACTER, INKS, type Masks, type Scene, textsOf } from "../core/animation";
import { widthOf } from "../core/layout";

const FONT = '20px "Plex Mono", ui-monospace, monospace'; // a character is as wide as `CHARACTER`

/** The scene as a GIF. */
export async function makeGif(scene: Scene): Promise<Blob> {
  const masks = await drawTexts(textsOf(scene));
  const worker = new Worker(new URL("./gif-worker.ts", import.meta.url), { type: "module" });
  try {
    const bytes = await new Promise<Uint8Array<ArrayBuffer>>((resolve, reject) => {
      worker.onmessage = ({ data }) => resolve(data);
      worker.onerror = (event) => reject(new Error(event.message || "The picture cannot be drawn."));
      worker.postMessage({ scene, masks });
    });
    return new Blob([bytes], { type: "image/gif" });
  } finally {
    worker.terminate();
  }
}

async function drawTexts(texts: ReadonlySet<string>): Promise<Masks> {
  await document.fonts.load(FONT, [...texts].join(""));
  const canvas = document.createElement("canvas");
  const masks = new Map<string, Uint8Array>();
  const widest = Math.max(1, ...[...texts].map(widthOf));
  [canvas.width, canvas.height] = [widest * CHARACTER, BOX];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (!context) throw new Error("This browser draws no pictures.");
  [context.font, context.textBaseline] = [FONT, "alphabetic"];
  for (const text of texts) {
    const width = widthOf(text) * CHARACTER;
    if (!width) continue;
    context.clearRect(0, 0, canvas.width, BOX);
    context.fillText(text, 0, BOX - 9, width);
    const { data } = context.getImageData(0, 0, width, BOX);
    masks.set(
      text,
      Uint8Array.from({ length: width * BOX }, (_, pixel) =>
        Math.round(((data[4 * pixel + 3] ?? 0) * (INKS - 1)) / 255),
      ),
    );
  }
  return masks;
}
