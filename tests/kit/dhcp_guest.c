/*
 * The boot disk of a guest that asks for an address by DHCP until it has one, and then halts. It needs a fiftieth of
 * the processor time of a Linux. It runs in real mode below 64 KiB, on the legacy virtio-net of QEMU's `pc`.
 */

__asm__(
    ".globl _start\n"
    "_start: cli; ljmp $0, $1f\n"
    "1: xorl %eax, %eax; movw %ax, %ds; movw %ax, %es; movw %ax, %ss; movl $0x7c00, %esp; cld; sti\n"
    "movb $0x42, %ah; movw $rest, %si; int $0x13\n" /* read the rest of the disk; its number is in dl */
    "calll run\n"
    "2: cli; hlt; jmp 2b\n"
    "rest: .word 16, 7; .long 0x7e00; .quad 1\n"
    ".org 510; .word 0xaa55\n");

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

enum { RECEIVE, SEND };
enum { DISCOVER = 1, OFFER = 2, REQUEST = 3, ACKNOWLEDGEMENT = 5 };
enum { REPEAT_TICKS = 36 }; /* two seconds */

/* A queue as virtio places it in memory, in its legacy layout (virtio 1.1, 2.6.2), and 12 KiB long. */
struct queue {
    struct {
        u32 address, address_high, length;
        u16 flags, next;
    } descriptors[256];
    struct {
        u16 flags, index, ring[256];
    } available;
    u8 padding[4096 - 516];
    struct {
        u16 flags, index;
        struct {
            u32 id, length;
        } ring[256];
    } used;
    u8 end[4096 - 2052];
};

/* An Ethernet frame with a DHCP message (RFC 2131), after the header of virtio-net. */
struct frame {
    u8 virtio[10], to[6], from[6];
    u16 type;
    u8 version, service;
    u16 ip_length, id, fragment;
    u8 ttl, protocol;
    u16 ip_checksum;
    u32 source, target;
    u16 source_port, target_port, udp_length, udp_checksum;
    u8 op, hardware, mac_length, hops;
    u32 transaction;
    u16 seconds, flags;
    u32 client, yours, next_server, relay;
    u8 mac[16], names[192];
    u32 magic;
    u8 options[700];
} __attribute__((packed));

/* Below the stack and the code at 0x7c00, and above them. */
#define QUEUES ((volatile struct queue *)0x1000)
#define RECEIVED ((volatile struct frame *)0xa000)
#define SENT ((volatile struct frame *)0xc000)
/* Counted by the BIOS, 18.2 a second. */
#define TICKS (*(volatile u32 *)0x46c)

static void out8(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static void out16(u16 port, u16 value) { __asm__ volatile("outw %0, %1" ::"a"(value), "Nd"(port)); }
static void out32(u16 port, u32 value) { __asm__ volatile("outl %0, %1" ::"a"(value), "Nd"(port)); }

static u8 in8(u16 port)
{
    u8 value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static u32 in32(u16 port)
{
    u32 value;
    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static u16 swap(u16 value) { return value << 8 | value >> 8; }

/* Select a word of a device's PCI configuration; port 0xcfc then is this word. */
static void select_pci(u32 device, u32 offset) { out32(0xcf8, 0x80000000 | device << 11 | offset); }

/* Offer the device the only buffer of a queue, again: every entry of `available.ring` is descriptor 0. */
static void offer_buffer(u16 ports, int number, volatile void *buffer, u32 length)
{
    volatile struct queue *queue = QUEUES + number;
    queue->descriptors[0].address = (u32)buffer;
    queue->descriptors[0].length = length;
    queue->descriptors[0].flags = number == RECEIVE ? 2 : 0; /* the device writes */
    queue->available.index++;
    out16(ports + 16, number);
}

static volatile u8 *add_address(volatile u8 *option, u8 code, u32 address)
{
    *option++ = code;
    *option++ = 4;
    *(volatile u32 *)option = address;
    return option + 4;
}

static void send(u16 ports, int kind, u32 address, u32 server)
{
    volatile struct frame *frame = SENT;
    volatile u8 *option = frame->options;
    u32 sum = 0;
    for (u32 i = 0; i < sizeof *frame; i++)
        ((volatile u8 *)frame)[i] = 0;
    for (int i = 0; i < 6; i++) {
        frame->to[i] = 0xff;
        frame->from[i] = frame->mac[i] = in8(ports + 20 + i);
    }
    frame->type = swap(0x0800);
    frame->version = 0x45;
    frame->ip_length = swap(20 + 8 + 300);
    frame->ttl = 64;
    frame->protocol = 17;
    frame->target = 0xffffffff;
    for (int i = 0; i < 10; i++)
        sum += ((volatile u16 *)&frame->version)[i];
    frame->ip_checksum = ~(sum + (sum >> 16));
    frame->source_port = swap(68);
    frame->target_port = swap(67);
    frame->udp_length = swap(8 + 300);
    frame->op = frame->hardware = 1;
    frame->mac_length = 6;
    frame->transaction = *(volatile u32 *)&frame->mac[2];
    frame->flags = swap(0x8000); /* the answer is to be broadcast */
    frame->magic = 0x63538263;
    *option++ = 53;
    *option++ = 1;
    *option++ = kind;
    if (kind == REQUEST)
        option = add_address(add_address(option, 50, address), 54, server);
    *option = 255;
    offer_buffer(ports, SEND, frame, 10 + 14 + 20 + 8 + 300);
}

/* Answer an offer; return 1 for the acknowledgement. */
static int handle(u16 ports, volatile struct frame *frame)
{
    volatile u8 *option = frame->options;
    int kind = 0;
    u32 server = 0;
    if (frame->type != swap(0x0800) || frame->protocol != 17 || frame->target_port != swap(68) ||
        frame->transaction != SENT->transaction)
        return 0;
    for (; *option != 255 && option < frame->options + 300; option += 2 + option[1]) {
        if (*option == 53)
            kind = option[2];
        if (*option == 54)
            server = *(volatile u32 *)(option + 2);
    }
    if (kind == OFFER)
        send(ports, REQUEST, frame->yours, server);
    return kind == ACKNOWLEDGEMENT;
}

void run(void)
{
    u32 device = 0;
    u16 ports, seen = 0;
    while (select_pci(device, 0), in32(0xcfc) != 0x10001af4)
        if (++device == 32)
            return; /* no virtio-net */
    select_pci(device, 4);
    out32(0xcfc, in32(0xcfc) | 5); /* it may use ports and memory */
    select_pci(device, 16);
    ports = in32(0xcfc) & ~3;
    out8(ports + 18, 0); /* reset */
    out8(ports + 18, 3); /* there is a driver */
    out32(ports + 4, 0x20); /* of the device's features only its MAC */
    for (volatile u8 *each = (volatile u8 *)QUEUES; each < (volatile u8 *)(QUEUES + 2); each++)
        *each = 0;
    for (int i = RECEIVE; i <= SEND; i++) {
        out16(ports + 14, i);
        out32(ports + 8, (u32)(QUEUES + i) >> 12);
    }
    out8(ports + 18, 7); /* the driver is ready */
    offer_buffer(ports, RECEIVE, RECEIVED, sizeof(struct frame));
    for (;;) {
        u32 start = TICKS;
        send(ports, DISCOVER, 0, 0);
        while (TICKS - start < REPEAT_TICKS) {
            if (QUEUES[RECEIVE].used.index == seen) {
                __asm__ volatile("hlt"); /* until the next tick */
                continue;
            }
            seen++;
            if (handle(ports, RECEIVED))
                return;
            offer_buffer(ports, RECEIVE, RECEIVED, sizeof(struct frame));
        }
    }
}
