//! Power loss: at each failpoint the filesystem under the store (ext4 on a loop device of its own) stops
//! writing anything, what was never synced included; then it is unmounted, mounted and examined.
//!
//! Needs root and loop devices, and fails without them: a guarantee that was not checked is not one.

use super::*;
use mooncake_chaos::Disk;

/// Enough for the model and the filesystem's own.
const IMAGE_BYTES: u64 = 48 << 20;

/// From now on nothing reaches the disk of this filesystem.
pub(super) fn shut_down(mount: &Path) {
    mooncake_chaos::disk::shut_down(mount).unwrap();
}

/// A disk and the folder that its image is in, dropped in this order.
struct Bed {
    disk: Disk,
    _dir: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::create(dir.path(), "disk", IMAGE_BYTES).unwrap();
        Self { disk, _dir: dir }
    }

    fn root(&self) -> PathBuf {
        self.disk.path().join("store")
    }
}

/// Loses power at `point`; gives what was verified before, or `None` if the point is not passed so often.
fn lose_power(bed: &Bed, point: &str, broken: Option<&str>) -> Option<BTreeSet<u32>> {
    let mount = bed.disk.path();
    let mut env = vec![(ENV_KILL_AT, point), (ENV_POWER, mount.to_str().unwrap())];
    env.extend(broken.map(|rules| (ENV_BREAK, rules)));
    let outcome = follow(spawn(&bed.root(), &env), |_, _| ());
    bed.disk.power_cycle().unwrap();
    outcome.killed.then_some(outcome.verified)
}

#[test]
fn power_lost_before_and_after_every_system_call() {
    let _alone = alone();
    let truth = truth();
    for name in BEGIN_FAILPOINTS
        .iter()
        .chain(FLUSH_FAILPOINTS)
        .chain(PUBLISH_FAILPOINTS)
    {
        for nth in [1, 3] {
            let point = format!("{name}#{nth}");
            let bed = Bed::new();
            let Some(verified) = lose_power(&bed, &point, None) else {
                assert!(nth > 1, "{name} is never passed");
                break;
            };
            check_after(&bed.root(), &truth, &verified).unwrap_or_else(|why| panic!("{point}: {why}"));
            finish(&bed.root(), &truth);
        }
    }
}

#[test]
fn syncs_that_are_left_out_are_noticed() {
    let _alone = alone();
    let truth = truth();
    for (rules, point, want) in [
        ("flush::skip_sync", "publish::begin#1", "verified bytes were lost"),
        (
            "flush::skip_sync,publish::skip_sync",
            "publish::after_sync_staging#1",
            "under the final name",
        ),
    ] {
        let bed = Bed::new();
        let verified = lose_power(&bed, point, Some(rules)).unwrap();
        let error = check_after(&bed.root(), &truth, &verified).unwrap_err();
        assert!(error.contains(want), "{rules}: {error}");
    }
}
