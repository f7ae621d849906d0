//! Any history of operations and restarts, against a map.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Write(u32, u64),
    WriteWrong(u32),
    Forget(Vec<u32>),
    Flush,
    /// Restart; these blocks' bytes get a flipped bit meanwhile.
    Restart(Vec<u32>),
    PublishWrong,
    Publish,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (0u32..5, 0u64..3).prop_map(|(b, v)| Op::Write(b, v)),
        2 => (0u32..5).prop_map(Op::WriteWrong),
        2 => prop::collection::vec(0u32..5, 0..3).prop_map(Op::Forget),
        1 => Just(Op::Flush),
        2 => prop::collection::vec(0u32..5, 0..2).prop_map(Op::Restart),
        1 => Just(Op::PublishWrong),
        1 => Just(Op::Publish),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Any history, against a map from block to the variant of bytes that it holds.
    #[test]
    fn like_a_map(ops in prop::collection::vec(op(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let m = usual();
        let mut store = open(dir.path());
        let mut artifact = store.begin(new(&m)).unwrap();
        let mut held: BTreeMap<u32, u64> = BTreeMap::new();
        let mut order: Vec<u32> = Vec::new();
        let mut staged = false;
        for op in ops {
            match op {
                Op::Write(b, v) => {
                    let data = bytes(&artifact, b, v);
                    let result = artifact.write_block(b, &Algorithm::Blake3.digest(&data), &data);
                    match held.get(&b) {
                        Some(&have) if have != v => {
                            let refused = matches!(result, Err(WriteError::AlreadyHeld { .. }));
                            prop_assert!(refused);
                        }
                        Some(_) => prop_assert!(result.is_ok()),
                        None => {
                            prop_assert!(result.is_ok());
                            held.insert(b, v);
                            order.push(b);
                        }
                    }
                }
                Op::WriteWrong(b) => {
                    let wrong = artifact.write_block(b, &Digest::sha256(b"no"), &bytes(&artifact, b, 0));
                    let refused = matches!(wrong, Err(WriteError::DigestMismatch { .. }));
                    prop_assert!(refused);
                }
                Op::Forget(blocks) => {
                    let result = artifact.forget(&blocks);
                    prop_assert_eq!(result.is_ok(), !staged);
                    if !staged {
                        held.retain(|b, _| !blocks.contains(b));
                    }
                }
                Op::Flush => artifact.flush().unwrap(),
                Op::Restart(flipped) => {
                    drop((store, artifact));
                    if !staged {
                        for b in flipped.iter().collect::<std::collections::BTreeSet<_>>() {
                            let range = mooncake_proto::manifest::BlockMap::new(&m, BLOCK).locate(*b).unwrap();
                            flip(&staging_file(dir.path(), &m, &m.files[range.file].path), range.offset + 3);
                            held.remove(b);
                        }
                    }
                    store = open(dir.path());
                    artifact = store.begin(new(&m)).unwrap();
                    order = artifact.added(0);
                    let mut sorted = order.clone();
                    sorted.sort();
                    prop_assert_eq!(sorted, held.keys().copied().collect::<Vec<_>>());
                }
                Op::PublishWrong => {
                    let seal = Seal { block_size_bytes: BLOCK, algorithm: Algorithm::Blake3, root: Digest::sha256(b"no") };
                    prop_assert!(artifact.publish(&seal).is_err());
                }
                Op::Publish => {
                    if let Some(seal) = artifact.seal_if_whole() {
                        let path = artifact.publish(&seal).unwrap();
                        prop_assert!(path.join("sub/dir/b.bin").exists());
                        staged = true;
                    }
                }
            }
            let whole = held.len() == 5;
            prop_assert_eq!(artifact.added(0), order.clone());
            prop_assert_eq!(artifact.have_count() as usize, held.len());
            prop_assert_eq!(artifact.seal_if_whole().is_some(), whole);
            let is_staged = matches!(artifact.state(), ArtifactState::Staged { .. });
            prop_assert_eq!(is_staged, staged);
            let mut verified = 0;
            for b in 0..5 {
                prop_assert_eq!(artifact.has(b), held.contains_key(&b));
                let read = artifact.read_block(b).ok();
                if let Some(read) = &read {
                    verified += read.len() as u64;
                    prop_assert_eq!(artifact.digest(b), Some(Algorithm::Blake3.digest(read)));
                }
                prop_assert!(read == held.get(&b).map(|&v| bytes(&artifact, b, v)));
            }
            prop_assert_eq!(artifact.verified_bytes(), verified);
            let objects = m.files.iter().enumerate().flat_map(|(f, file)| (0..file.chunk_count).map(move |c| (f, file.chunk_range(c))));
            let done = objects.filter(|(f, r)| artifact.blocks().overlapping(*f, r.clone()).all(|b| held.contains_key(&b))).count();
            prop_assert_eq!(artifact.objects_done(), done as u64);
        }
    }
}
