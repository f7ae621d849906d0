//! The arithmetic of blocks, and the root over their digests.

use super::{BLOCK_SIZE_RANGE, Manifest};
use crate::digest::{Algorithm, Digest};

/// About how many blocks an artifact is cut into, where its size allows.
const BLOCKS_WANTED: u64 = 2000;

/// The block size for an artifact of `total_size_bytes`: a power of two between 256 KiB and 4 MiB.
pub fn block_size_for(total_size_bytes: u64) -> u32 {
    let (min, max) = BLOCK_SIZE_RANGE.into_inner();
    let wanted = total_size_bytes
        .div_ceil(BLOCKS_WANTED)
        .clamp(min.into(), max.into());
    (wanted as u32).next_power_of_two()
}

/// Where one block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// Index into [`Manifest::files`].
    pub file: usize,
    /// Offset within the file, in bytes.
    pub offset: u64,
    /// Length in bytes: the block size, less at the end of a file.
    pub len: u32,
}

/// The blocks of one manifest: numbered through all files, in file order.
#[derive(Clone, Debug)]
pub struct BlockMap {
    block_size: u32,
    sizes: Vec<u64>,
    /// First block of each file; one more entry with the total.
    first: Vec<u32>,
}

impl BlockMap {
    /// For `manifest` in blocks of `block_size` bytes.
    ///
    /// # Panics
    /// If the block size is not a power of two (orders and files are checked before they get here).
    pub fn new(manifest: &Manifest, block_size: u32) -> Self {
        assert!(
            block_size.is_power_of_two(),
            "block size {block_size} is not a power of two"
        );
        let sizes: Vec<u64> = manifest.files.iter().map(|f| f.size_bytes).collect();
        let mut first = Vec::with_capacity(sizes.len() + 1);
        let mut next = 0u64;
        for size in &sizes {
            first.push(u32::try_from(next).expect("at most MAX_BLOCKS blocks"));
            next += size.div_ceil(block_size.into());
        }
        first.push(u32::try_from(next).expect("at most MAX_BLOCKS blocks"));
        Self {
            block_size,
            sizes,
            first,
        }
    }

    /// Number of blocks.
    pub fn len(&self) -> u32 {
        *self.first.last().expect("never empty")
    }

    /// Whether there is no block (all files are empty).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block size in bytes.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Sum of all files' sizes.
    pub fn total_bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// Where block `block` lies; `None` past the end.
    pub fn locate(&self, block: u32) -> Option<BlockRange> {
        if block >= self.len() {
            return None;
        }
        // The last file whose first block is <= block; empty files share a first block, the last one wins.
        let file = self.first.partition_point(|&f| f <= block) - 1;
        let offset = u64::from(block - self.first[file]) * u64::from(self.block_size);
        let len = (self.sizes[file] - offset).min(self.block_size.into()) as u32;
        Some(BlockRange { file, offset, len })
    }

    /// The blocks of file `file`.
    pub fn of_file(&self, file: usize) -> std::ops::Range<u32> {
        self.first[file]..self.first[file + 1]
    }

    /// The blocks that overlap the byte range `range` of file `file`.
    pub fn overlapping(&self, file: usize, range: std::ops::Range<u64>) -> std::ops::Range<u32> {
        let first = self.first[file];
        if range.is_empty() {
            return first..first;
        }
        let bs = u64::from(self.block_size);
        first + (range.start / bs) as u32..first + range.end.div_ceil(bs) as u32
    }
}

/// The root that a seal commits: `H(domain, algorithm, block size, manifest digest, block digests)`, each
/// part of fixed or prefixed length, under the same algorithm as the blocks.
pub fn root(algorithm: Algorithm, block_size: u32, manifest: &Digest, blocks: &[Digest]) -> Digest {
    let mut hasher = algorithm.hasher();
    hasher.update(b"mooncake-distribution root v1\0");
    hasher.update(algorithm.name().as_bytes());
    hasher.update(b"\0");
    hasher.update(&block_size.to_be_bytes());
    hasher.update(manifest.as_bytes());
    hasher.update(&(blocks.len() as u64).to_be_bytes());
    for digest in blocks {
        hasher.update(digest.as_bytes());
    }
    hasher.finish()
}
