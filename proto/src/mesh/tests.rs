use super::*;
use proptest::prelude::*;

fn mesh(racks: usize, per_rack: usize) -> Mesh<u32> {
    let mut mesh = Mesh::new();
    for i in 0..(racks * per_rack) as u32 {
        mesh.insert(i, hash_id(&format!("n{i}")), &rack(i, racks), i == 0);
    }
    mesh
}

fn rack(i: u32, racks: usize) -> String {
    format!("r{}", i as usize % racks)
}

/// How many steps the furthest member is from member `from`; `None`: somebody is out of reach.
fn eccentricity(mesh: &Mesh<u32>, from: u32, gone: &BTreeSet<u32>) -> Option<usize> {
    let (mut seen, mut edge, mut steps) = (BTreeSet::from([from]), vec![from], 0);
    loop {
        let next: BTreeSet<u32> = edge.iter().flat_map(|k| mesh.neighbours(k)).collect();
        edge = next
            .into_iter()
            .filter(|k| !gone.contains(k) && seen.insert(*k))
            .collect();
        if edge.is_empty() {
            break;
        }
        steps += 1;
    }
    (seen.len() + gone.len() == mesh.len()).then_some(steps)
}

fn assert_sound(mesh: &Mesh<u32>) {
    for key in mesh.members.keys() {
        let neighbours = mesh.neighbours(key);
        assert!(!neighbours.contains(key), "{key} is its own neighbour");
        assert!(neighbours.is_sorted_by(|a, b| a < b), "{key}: {neighbours:?}");
        for other in &neighbours {
            assert!(
                mesh.neighbours(other).contains(key),
                "{other} does not know {key}"
            );
        }
        let bound = if mesh.len() <= EVERYBODY {
            EVERYBODY - 1
        } else {
            MAX_NEIGHBOURS
        };
        assert!(neighbours.len() <= bound, "{key} has {}", neighbours.len());
    }
    if let Some(first) = mesh.members.keys().next() {
        assert!(
            eccentricity(mesh, *first, &BTreeSet::new()).is_some(),
            "not connected"
        );
    }
}

#[test]
fn a_small_mesh_is_everybody() {
    let mesh = mesh(3, EVERYBODY / 3);
    for key in mesh.members.keys() {
        assert_eq!(mesh.neighbours(key).len(), mesh.len() - 1);
    }
}

#[test]
fn a_large_mesh_is_bounded_symmetric_connected_and_shallow() {
    for racks in [1, 4, 40] {
        let mesh = mesh(racks, 1000 / racks);
        assert_sound(&mesh);
        let depth = eccentricity(&mesh, 0, &BTreeSet::new()).unwrap();
        assert!(depth <= 8, "{racks} racks: {depth} steps");
        let ends: usize = mesh.members.keys().map(|k| mesh.neighbours(k).len()).sum();
        assert!(ends / mesh.len() >= 20, "{racks} racks: {ends} ends");
    }
}

#[test]
fn only_gateways_cross_and_the_seed_stays_at_home() {
    let (racks, mesh) = (4, mesh(4, 250));
    let mut crossing = BTreeMap::<u32, usize>::new();
    for key in mesh.members.keys() {
        let far = mesh
            .neighbours(key)
            .iter()
            .filter(|o| rack(**o, racks) != rack(*key, racks))
            .count();
        if far > 0 {
            assert_ne!(*key, 0, "the seed is asked from outside");
            *crossing.entry(key % racks as u32).or_default() += 1;
        }
    }
    assert_eq!(crossing.values().copied().collect::<Vec<_>>(), [GATEWAYS; 4]);
    // Alone in its rack it has to be.
    let mut alone = mesh.clone();
    alone.insert(0, hash_id("n0"), "elsewhere", true);
    assert_sound(&alone);
    assert!(!alone.neighbours(&0).is_empty());
}

#[test]
fn one_in_twenty_dead_cuts_off_nobody() {
    for racks in [1, 4] {
        let mesh = mesh(racks, 1000 / racks);
        for round in 0..20u64 {
            let dead = |i: &u32| *i != 0 && mix(round << 32 | u64::from(*i)).is_multiple_of(20);
            let gone: BTreeSet<u32> = mesh.members.keys().copied().filter(dead).collect();
            assert!(gone.len() > 20);
            assert!(
                eccentricity(&mesh, 0, &gone).is_some(),
                "{racks} racks, round {round}"
            );
        }
    }
}

#[test]
fn who_comes_or_goes_changes_few_lists() {
    let before = mesh(1, 1000);
    let mut after = before.clone();
    after.remove(&500);
    let changed = |k: &&u32| before.neighbours(k) != after.neighbours(k);
    let changed = after.members.keys().filter(changed).count();
    assert!(changed <= 2 * NEAR_RINGS, "{changed} lists changed");
    after.insert(500, hash_id("n500"), "r0", false);
    for key in before.members.keys() {
        assert_eq!(before.neighbours(key), after.neighbours(key));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_history_is_sound(racks in 1usize..6, ops in prop::collection::vec((0u32..160, any::<bool>(), 0u8..30), 1..300)) {
        let mut mesh = Mesh::new();
        let mut members = BTreeMap::new();
        for (i, add, kind) in ops {
            if add {
                // One seed at a time, as the masters have it.
                let seed = kind == 0 && !members.values().any(|s| *s);
                mesh.insert(i, hash_id(&format!("n{i}")), &rack(i, racks), seed);
                members.insert(i, seed);
            } else {
                mesh.remove(&i);
                members.remove(&i);
            }
        }
        prop_assert_eq!(mesh.len(), members.len());
        assert_sound(&mesh);
        let mut straight = Mesh::new();
        for (i, seed) in members.iter().rev() {
            straight.insert(*i, hash_id(&format!("n{i}")), &rack(*i, racks), *seed);
        }
        for key in members.keys() {
            prop_assert_eq!(mesh.neighbours(key), straight.neighbours(key));
        }
    }
}
