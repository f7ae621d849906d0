//! Disks that fail: ext4 on a loop device of its own, which loses power or runs full.
//!
//! Needs root, `mount` and `mkfs.ext4`. Guaranteed: after [`shut_down`] nothing that was not synced before reaches
//! the image. Not covered: a device that lies about its own cache, torn sectors.

use crate::testbed::command;
use anyhow::{Context, Result};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

/// `_IOR('X', 125, u32)` of Linux's `ext4.h`.
const FS_IOC_SHUTDOWN: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<u32>(b'X', 125);
/// Drops the journal that is not on the disk yet, too.
const NO_LOG_FLUSH: u32 = 2;

/// From now on nothing reaches the disk of this filesystem; what was never synced is lost.
pub fn shut_down(mount: &Path) -> Result<()> {
    let folder = File::open(mount)?;
    // SAFETY: the request takes a pointer to a u32 that it only reads; `Setter` passes one to its own copy.
    unsafe {
        let request = rustix::ioctl::Setter::<FS_IOC_SHUTDOWN, u32>::new(NO_LOG_FLUSH);
        rustix::ioctl::ioctl(&folder, request)
            .with_context(|| format!("cannot shut the filesystem at {} down", mount.display()))
    }
}

/// A filesystem of its own, unmounted on drop.
#[derive(Debug)]
pub struct Disk {
    image: PathBuf,
    mount: PathBuf,
}

impl Disk {
    /// Makes `<dir>/<name>.image` and mounts it at `<dir>/<name>`.
    pub fn create(dir: &Path, name: &str, size_bytes: u64) -> Result<Self> {
        let disk = Self {
            image: dir.join(format!("{name}.image")),
            mount: dir.join(name),
        };
        File::create(&disk.image)?.set_len(size_bytes)?;
        let image = disk.image.display().to_string();
        // Nothing is reserved for root, who runs the processes under test: full is full.
        command("mkfs.ext4", &["-q", "-F", "-m", "0", &image], "")?;
        fs::create_dir_all(&disk.mount)?;
        disk.mount()?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    fn mount(&self) -> Result<()> {
        let (image, mount) = (self.image.display().to_string(), self.mount.display().to_string());
        command("mount", &["-o", "loop", &image, &mount], "")?;
        Ok(())
    }

    /// See [`shut_down`]. Processes that use it get I/O errors until they are ended.
    pub fn lose_power(&self) -> Result<()> {
        shut_down(&self.mount)
    }

    /// Unmounts and mounts it, as a restart of the machine does. No process may use it.
    pub fn power_cycle(&self) -> Result<()> {
        command("umount", &[&self.mount.display().to_string()], "")?;
        self.mount()
    }

    /// Takes all free space but about `leave_bytes`; removing the file gives it back.
    pub fn fill(&self, leave_bytes: u64) -> Result<PathBuf> {
        let path = self.mount.join(".filled-by-the-testbed");
        let mut file = File::options().create(true).append(true).open(&path)?;
        let stat = rustix::fs::statvfs(&self.mount)?;
        let take = (stat.f_bavail * stat.f_frsize).saturating_sub(leave_bytes);
        let preallocate = rustix::fs::FallocateFlags::empty();
        let had = file.metadata()?.len();
        if take > 0 && rustix::fs::fallocate(&file, preallocate, had, take).is_err() && leave_bytes == 0 {
            // The filesystem's own blocks come out of it too: write until it refuses.
            let block = vec![0; 64 << 10];
            while file.write_all(&block).is_ok() {}
        }
        Ok(path)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let mount = self.mount.display().to_string();
        if command("umount", &[&mount], "").is_err() {
            // Somebody still uses it; it goes when they do.
            let _ = command("umount", &["-l", &mount], "");
        }
    }
}
