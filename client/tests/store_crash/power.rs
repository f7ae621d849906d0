//! Power loss: at each failpoint the filesystem under the store (ext4 on a loop device of its own) stops
//! writing anything, what was never synced included; then it is unmounted, mounted and examined.
//!
//! Needs root and loop devices, and fails without them: a guarantee that was not checked is not one.

use super::*;

/// `_IOR('X', 125, u32)` of Linux's `ext4.h`, with the flag that drops the journal too.
const FS_IOC_SHUTDOWN: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<u32>(b'X', 125);
const NO_LOG_FLUSH: u32 = 2;
/// Enough for the model and the filesystem's own.
const IMAGE_BYTES: u64 = 48 << 20;

/// From now on nothing reaches the disk of this filesystem.
pub(super) fn shut_down(mount: &Path) {
    let folder = fs::File::open(mount).unwrap();
    // SAFETY: the request takes a pointer to a u32 that it only reads; `Setter` passes one to its own copy.
    unsafe {
        let request = rustix::ioctl::Setter::<FS_IOC_SHUTDOWN, u32>::new(NO_LOG_FLUSH);
        rustix::ioctl::ioctl(&folder, request).unwrap();
    }
}

fn run(command: &str, args: &[&std::ffi::OsStr]) {
    let output = Command::new(command).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{command} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A mounted filesystem, unmounted when dropped.
struct Disk {
    dir: tempfile::TempDir,
}

impl Disk {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        fs::File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
        run("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), image.as_os_str()]);
        fs::create_dir(dir.path().join("mnt")).unwrap();
        let disk = Self { dir };
        disk.mount();
        disk
    }

    fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn root(&self) -> PathBuf {
        self.mount_point().join("store")
    }

    fn mount(&self) {
        let image = self.dir.path().join("image");
        run(
            "mount",
            &[
                "-o".as_ref(),
                "loop".as_ref(),
                image.as_os_str(),
                self.mount_point().as_os_str(),
            ],
        );
    }

    fn power_cycle(&self) {
        run("umount", &[self.mount_point().as_os_str()]);
        self.mount();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.mount_point()).output();
    }
}

/// Loses power at `point`; gives what was verified before, or `None` if the point is not passed so often.
fn lose_power(disk: &Disk, point: &str, broken: Option<&str>) -> Option<BTreeSet<u32>> {
    let mount = disk.mount_point();
    let mut env = vec![(ENV_KILL_AT, point), (ENV_POWER, mount.to_str().unwrap())];
    env.extend(broken.map(|rules| (ENV_BREAK, rules)));
    let outcome = follow(spawn(&disk.root(), &env), |_, _| ());
    disk.power_cycle();
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
            let disk = Disk::new();
            let Some(verified) = lose_power(&disk, &point, None) else {
                assert!(nth > 1, "{name} is never passed");
                break;
            };
            check_after(&disk.root(), &truth, &verified).unwrap_or_else(|why| panic!("{point}: {why}"));
            finish(&disk.root(), &truth);
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
        let disk = Disk::new();
        let verified = lose_power(&disk, point, Some(rules)).unwrap();
        let error = check_after(&disk.root(), &truth, &verified).unwrap_err();
        assert!(error.contains(want), "{rules}: {error}");
    }
}
