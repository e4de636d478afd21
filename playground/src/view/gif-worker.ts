/** Encodes pictures beside the page, which stays as quick as before. */

import { type Masks, type Scene, toGif } from "../core/animation";

addEventListener("message", ({ data }: MessageEvent<{ scene: Scene; masks: Masks }>) => {
  const bytes = toGif(data.scene, data.masks);
  postMessage(bytes, { transfer: [bytes.buffer] });
});
