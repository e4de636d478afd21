/** What the playground uses of gifenc, which has no types of its own. */
declare module "gifenc" {
  interface FrameOptions {
    /** Of the first frame: that of all. */
    palette?: number[][];
    /** In milliseconds. */
    delay?: number;
    transparent?: boolean;
    transparentIndex?: number;
    /** Of the first frame. 0: for ever, -1: once. */
    repeat?: number;
    /** 1: the next frame is drawn over this one. */
    dispose?: number;
  }

  interface Encoder {
    writeFrame(index: Uint8Array, width: number, height: number, options: FrameOptions): void;
    finish(): void;
    bytes(): Uint8Array<ArrayBuffer>;
  }

  export function GIFEncoder(): Encoder;
}
